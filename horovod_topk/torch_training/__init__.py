"""What the adapters of PyTorch share: optimizers, loss scaling, their steps, local steps."""
