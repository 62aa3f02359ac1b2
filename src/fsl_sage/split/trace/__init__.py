"""What a forward pass does.

skeleton   copies of a model's structure that share or replace its tensors
inputs     the example's arguments, and variants of them
recording  the trace: which modules are called, and which values each operation reads
"""
