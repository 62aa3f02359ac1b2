"""What is fast, against what: ratios, both sides in one run, with their spread over repeats."""
