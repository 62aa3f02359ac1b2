"""Auxiliary models, derived from the server's part.

rehearsal        runs copies to see which modules are called
blocks           the blocks behind a cut
recipe           what an auxiliary leaves out, and what is made anew
auxiliary        makes it
double_backward  whether it can be differentiated twice, as alignment does
"""
