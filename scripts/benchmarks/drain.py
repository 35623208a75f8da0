"""Speed of the DALI loader of the code that PYTHONPATH leads to: drain.py DATA BATCH_SIZE NUM_BATCHES KEY=VALUE...

Prints JSON. Other commits than this one can be measured. With COLD in the environment no file is in the page cache at
the start, and the first batches count, too.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import colossal_vit
import torch
from colossal_vit import config as configs
from colossal_vit.compat import cpu

try:
    import imagenet_dali_dataloader as loaders
    import train
except ImportError:  # version 0.10
    from colossal_vit.data import imagenet as loaders

    train = None

ON_GPU = torch.cuda.is_available()
DEVICE, THREADS = (torch.device("cuda", 0), len(os.sched_getaffinity(0))) if ON_GPU else (torch.device("cpu"), 2)
DRAINED = 8  # batches taken before the timing starts: more than are made ahead


def main() -> None:
    data, batch_size, num_batches, *overrides = sys.argv[1:]
    if not ON_GPU:
        cpu.enable()  # as a run does it: the process keeps freed memory
    records = loaders.find_records(Path(data), "train")
    values = [f"BATCH_SIZE={batch_size}", "NUM_CLASSES=8", "gradient_accumulation=1", *overrides]
    root = Path(colossal_vit.__path__[0]).parent
    path = root / "vit_imagenet_dali/config.py"
    config = train.SCRIPT.load(path, values) if train else configs.load(path, values, "imagenet")
    loader = loaders.DaliLoader(records, True, config, DEVICE, THREADS)

    def endless() -> Iterator:
        while True:
            yield from loader

    batches = endless()
    if "COLD" in os.environ:
        for path in records.shards:
            with open(path) as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    else:
        for _ in range(DRAINED):
            next(batches)
    started, used = time.perf_counter(), time.process_time()
    for _ in range(int(num_batches)):
        next(batches)
    if ON_GPU:
        torch.cuda.synchronize()
    images = int(batch_size) * int(num_batches)
    seconds, used = time.perf_counter() - started, time.process_time() - used
    print(json.dumps({"images/s": images / seconds, "CPU ms an image": used / images * 1000}), flush=True)
    os._exit(0)  # some of DALI's threads are still busy


main()
