"""Optimizers and the learning-rate schedule, and how they resume from a checkpoint.

| file | what it has |
|:--|:--|
| adamw.py | one function for each file in conf/optimizer |
| compiled_step.py | the formula of AdamW, and the step that the variants below share |
| master_weights.py | adamw_master |
| low_memory.py | adamw_8bit, adamw_bf16 and adamw_offload, which use torchao |
| schedule.py | the learning rate of each step |
| resume.py | how an optimizer and a schedule continue from a checkpoint |
"""
