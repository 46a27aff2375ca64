"""Processes that are forked from one that has imported what runs and commands import, which takes seconds."""

import multiprocessing

IMPORTED = [
    "esmshard.cli.app",
    "esmshard.embed.engines",
    "esmshard.predict.heads",
    "esmshard.parallel.launch",
    "esmshard.report.page",
    "esmshard.train.evaluate",
    "esmshard.train.finetune",
    "h5py",
    "sklearn.linear_model",
    "torch._dynamo",  # which each optimizer imports
]

forks = multiprocessing.get_context("forkserver")
# A process of tests has one such server, whoever asks for it, and its first list of modules is the one that counts.
forks.set_forkserver_preload(IMPORTED)
