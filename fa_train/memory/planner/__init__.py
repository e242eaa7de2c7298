"""Predicts how much memory a training step needs, and finds settings with which the step fits in memory.

The table first lists the type `Plan`. The other files follow in the order of the calls, and `plan_memory` is called
first:

| file | what it does |
|:--|:--|
| plan.py | defines `Plan`, the input of all other files: the model, the levers and the run's size |
| run.py | `plan_memory` checks that a run fits, and prints the plan |
| levers.py | searches for the fastest levers that fit, and for the longest sequence |
| predict.py | `predict` returns the bytes at the moment of the peak |
| moments.py | computes the bytes at each moment of a step |
| block.py, weights.py, optimizer.py | compute the bytes of a block, of the weights and of the optimizer |
| sharded.py | computes the bytes that FSDP2 adds in a sharded run |
"""
