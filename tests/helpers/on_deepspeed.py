"""Run a program as one of several ranks on DeepSpeed over gloo: python on_deepspeed.py PROGRAM [OPTIONS]"""

import os
import runpy
import sys

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed

deepspeed.ops.__compatible_ops__ = {}  # else it compiles a faster all_reduce first, which takes over a minute

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
