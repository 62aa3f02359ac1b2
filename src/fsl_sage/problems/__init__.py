"""What is learnt: a problem is data, a model, a task and a headline score."""
