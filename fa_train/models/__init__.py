"""A decoder model for packed streams of tokens, its LoRA adapters, and its Hugging Face checkpoints.

Read `GPT.forward` in gpt.py first.

| file | what it has |
|:--|:--|
| config.py | `ModelConfig`, the keys of conf/model |
| gpt.py | the decoder: `GPT`, `Block`, `SelfAttention` and `Head` |
| stream.py | the schedule of attention, built once per micro-batch from the documents' boundaries |
| rope.py | positions, and the table of rotation angles |
| attention.py | the four attention functions |
| ffn.py, norms.py | the other layers of a block |
| initial.py, shards.py | initial weights, and this rank's part of them |
| lora.py, nf4.py, float8.py | adapters, 4-bit weights and float8 matmuls for the linear layers of blocks |
| autocast.py | the dtype of matmuls under torch's autocast |
| origin.py, hf/ | checkpoints of Hugging Face transformers |
"""
