"""``python -m flashattn_ext.bench``: speed beside other attention kernels, measured in one run.

Imported by nothing else in the package. benchmarks/README.md says what is measured and how.
"""
