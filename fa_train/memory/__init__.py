"""Reduces the GPU memory that long sequences need, and predicts how much memory a run needs.

| file | setting | what it does |
|:--|:--|:--|
| memory.py | all keys of conf/memory | defines `Levers` and `Memory`, the settings that the model gets |
| checkpointing.py | memory.checkpointing | chooses what a block keeps, and what its backward recomputes |
| recompute.py | | recomputes the tensors of one function; checkpointing.py, the FFN and attention call it |
| offload.py, host_memory.py | memory.offload | moves what a block keeps to the host and back |
| tiled_ffn.py | memory.mlp_chunk | computes the FFN in chunks of tokens |
| swiglu_down.py | | fuses two operations of the FFN's backward in compiled models |
| loss.py | memory.loss | computes the logits and the loss in chunks of tokens |
| planner/ | memory=auto | predicts the memory of a step, and chooses the settings above |
"""
