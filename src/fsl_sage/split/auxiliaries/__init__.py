"""Auxiliary models, derived from the server's part.

rehearsal        runs copies to see which modules are called
blocks           the blocks behind a cut
recipe           what an auxiliary leaves out, and what is made anew
auxiliary        makes it
ridge            a linear estimator of the cut gradient in the place of a model
fitted_scale     one number more of an auxiliary whose alignment is by direction
double_backward  whether it can be differentiated twice, as alignment does
"""
