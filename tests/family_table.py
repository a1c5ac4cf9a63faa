"""The table of docs/families.md: python tests/family_table.py > docs/families.md. With names, those families alone."""

import sys
import time

from family_check import check_family
from family_configs import all_families

if __name__ == "__main__":
    import logging
    from transformers.utils import logging as tl
    tl.disable_progress_bar(); logging.disable(logging.WARNING)
    chosen = sys.argv[1:]
    for family in all_families():
        if not chosen or family.name in chosen or family.model_type in chosen:
            start = time.perf_counter()
            r = check_family(family)
            print(f"{r.family} | {r.engine.kind} | {r.engine.reason} | {r.trainer.kind} | {r.trainer.reason} | {time.perf_counter() - start:.1f}", flush=True)
