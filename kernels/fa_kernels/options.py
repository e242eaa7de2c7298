"""The compile options that every launch passes to Triton."""

# If enable_fp_fusion is False, a kernel multiplies and adds in two instructions instead of one. Triton 3.9 warns if the
# option is not given, because Triton 3.10 will change the default from True to False.
OPTIONS = {"enable_fp_fusion": True}
