"""Lightning callbacks: metrics, progress, checkpoints, interrupts, out-of-memory errors, and records of runs.

| file | what it does | when |
|:--|:--|:--|
| monitor.py | measures the run and logs metrics. The other callbacks read its measurements | each logged step |
| timestamp.py, communication.py | measure times on the device, and compare ranks, for monitor.py | each logged step |
| progress.py | shows the progress bar, or prints lines | each micro-batch |
| checkpoint.py | saves and removes checkpoints | every callbacks.checkpoint.every_n_train_steps steps |
| equal_weights.py | checks that all copies of the model are equal | every callbacks.equal_weights.every_n_steps steps |
| interrupt.py | ends the run on a signal, after a checkpoint | at a signal |
| out_of_memory.py | suggests settings that need less memory | at an error |
| record.py | writes result.json, and ends the W&B run | at the end |
"""
