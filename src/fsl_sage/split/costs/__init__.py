"""What each cut costs: bytes, FLOPs and memory.

profile     one training step, operation by operation
cut_points  every possible cut with its costs
"""
