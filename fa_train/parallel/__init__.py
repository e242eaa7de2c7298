"""Training on several GPUs: sharded weights, sharded checkpoints, and decisions that all ranks share.

| file | what it does | when |
|:--|:--|:--|
| ranks.py | says whether this process is a launcher, a rank or the only process | at the start |
| ctrl_c.py | makes Ctrl-C end a program at once while it starts | at the start |
| launch.py | starts one process per rank, and forwards signals to the ranks | in the launcher |
| decisions.py, rank_store.py | let rank 0 decide for all ranks, before the process group exists | at the start |
| communication.py | sets NCCL's timeout and the priority of its kernels | before the process group exists |
| ddp.py | chooses DDP for strategy=auto, and checks which gradients DDP averages | each run and step |
| fsdp.py | shards the model for strategy=fsdp | when the model is built |
| context/ | lets several ranks share one stream of tokens (strategy.context) | each micro-batch |
| agreement.py | lets all ranks stop at the same step | each micro-batch |
| sharded_checkpoint.py, background_save.py | write and read checkpoints, one part per rank | each save |
| failures.py | tells all ranks and the launcher why a rank failed | at a failure |
"""
