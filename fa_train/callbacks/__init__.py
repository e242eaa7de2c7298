"""Lightning callbacks: metrics, progress, checkpoints, interrupts and the record of a run."""
