"""The parts of a split model.

gates      where a part's forward pass is entered and left
part       one part, and the split that holds all of them
check      the proof that a split computes what the model does
splitting  split a model, or build one part of a plan
fixed      what of a part no training changes
shapes     the shapes of what crosses, without data
"""
