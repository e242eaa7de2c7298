"""The compile options of every kernel."""

# Without enable_fp_fusion, a kernel multiplies and adds in two instructions instead of one. Triton 3.9 warns if the
# option is not given, because Triton 3.10 will change its default to False.
OPTIONS = {"enable_fp_fusion": True}
