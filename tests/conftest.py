import os

# Before torch and numpy load their libraries: exactness tests compare runs bit for bit, and two
# cores serve all ranks.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["DS_ACCELERATOR"] = "cpu"

pytest_plugins = [
    "tests.helpers.s3",
    "tests.helpers.hosts",
    "tests.helpers.ceph",
    "tests.helpers.runs",
    "tests.helpers.slurm",
]
