"""Lightning callbacks for metrics, progress, checkpoints, interrupts, running out of memory and recording a run."""
