"""Optimizer updates on gradients that arrive late: the formulas, and what computes them.

`formulas` states the update of SGD, Adam and AdamW, `tracker` follows exchanges for it, `torch` and
`tensorflow` are the optimizers' steps.
"""
