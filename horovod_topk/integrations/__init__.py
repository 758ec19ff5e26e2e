"""Compression in one or two lines for training libraries; each module needs its library alone.

    Accelerator(kwargs_handlers=[TopKEFKwargs()])       horovod_topk.integrations.accelerate
    Trainer(..., callbacks=[TopKEFCallback()])          horovod_topk.integrations.transformers
    Trainer(..., callbacks=[TopKEFCallback()])          horovod_topk.integrations.lightning

They attach compressors of `horovod_topk.ddp` or `horovod_topk.fsdp` to the model that the library
has wrapped, and save residuals with the library's own checkpoints. docs/integrations.md has more.
"""
