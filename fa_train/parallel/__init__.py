"""Several GPUs: what is spread over them, and how."""
