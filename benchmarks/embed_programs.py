"""Programs that make embeddings on disk from a FASTA file in one process: `esmshard embed`, and its peers.

    python benchmarks/embed_programs.py NOTE esmshard ARGUMENTS OF EMBED
    python benchmarks/embed_programs.py NOTE fair-esm MODEL.pt FASTA DIRECTORY
    python benchmarks/embed_programs.py NOTE transformers MODEL FASTA DIRECTORY TOKENS

Each leaves what only the process itself can know in the JSON file NOTE: `work`, the seconds without start-up, which is
imports and the loading of the model; `above_model`, its peak memory in bytes above what it held with the model loaded;
and of esmshard `computing`, the seconds that the rows were waited for. Imports are inside the functions: they are part
of the whole that is timed.
"""

import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

PEER_TOKENS = 4096
"""The tokens of a batch: the default of fair-esm's script."""
FILE_ORDER = 8
"""The sequences of a batch if they are not sorted."""

Note = dict[str, float]


def loaded(note: Note) -> None:
    """Note that the model is loaded, and measure memory from here. Linux lets a process reset its peak."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    note["with_model"] = _status("VmRSS")


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def esmshard(note: Note, arguments: list[str]) -> None:
    """Run the command itself. Note when the model is loaded, and time the generator of rows."""
    from esmshard.cli import app
    from esmshard.embed import compute, engines
    from esmshard.embed.compute import Embedder

    whole, make, computing = engines.embed, compute.worker_of, Embedder.each

    def worked(*given: Any, **more: Any) -> dict[str, Any] | None:
        began = time.perf_counter()
        found = whole(*given, **more)
        note["work"] = time.perf_counter() - began - note.get("loading", 0.0)
        return found

    def made(work: compute.Work) -> compute.Worker:
        began = time.perf_counter()
        found = make(work)
        if "loading" not in note:
            loaded(note)
            note["loading"] = time.perf_counter() - began
        return found

    def timed(self: Embedder, *given: Any) -> Any:
        began = time.perf_counter()
        results = computing(self, *given)
        note["computing"] = note.get("computing", 0.0) + time.perf_counter() - began
        return results

    engines.embed, compute.worker_of, Embedder.each = worked, made, timed  # type: ignore[method-assign, assignment]
    sys.argv = ["esmshard", "embed", *arguments]
    app.main()


def fair_esm(note: Note, model_file: str, fasta: str, out: str) -> None:
    """Do the work of fair-esm's `scripts/extract.py --include mean` on a CPU, statement by statement.

    The script is in fair-esm's repository and not in its package. As in the script, logits are computed, too.
    """
    import argparse

    import torch
    from esm import FastaBatchedDataset, pretrained

    with torch.serialization.safe_globals([argparse.Namespace]):
        model, alphabet = pretrained.load_model_and_alphabet(model_file)
    model.eval()
    loaded(note)
    began = time.perf_counter()
    dataset = FastaBatchedDataset.from_file(fasta)
    batches = dataset.get_batch_indices(PEER_TOKENS, extra_toks_per_seq=1)
    loader = torch.utils.data.DataLoader(dataset, collate_fn=alphabet.get_batch_converter(1022), batch_sampler=batches)
    directory = Path(out)
    directory.mkdir(parents=True, exist_ok=True)
    with torch.no_grad():
        for labels, texts, tokens in loader:
            found = model(tokens, repr_layers=[model.num_layers], return_contacts=False)
            found["logits"].to(device="cpu")
            layers = {layer: x_BLD.to(device="cpu") for layer, x_BLD in found["representations"].items()}
            for k, label in enumerate(labels):
                length = min(1022, len(texts[k]))
                means = {layer: x_BLD[k, 1 : length + 1].mean(0).clone() for layer, x_BLD in layers.items()}
                torch.save({"label": label, "mean_representations": means}, directory / f"{label}.pt")
    note["work"] = time.perf_counter() - began


def transformers(note: Note, model_directory: str, fasta: str, out: str, tokens: str) -> None:
    """Do the work of a user's short script: `EsmModel` with SDPA, means over residues in `rows.f32`, ids in `ids.txt`.

    With `tokens` 0, eight at a time in file order; else sorted by length, in batches of so many tokens, padding
    counted.
    """
    import torch
    from transformers import AutoTokenizer, EsmModel
    from transformers.utils import logging

    logging.set_verbosity_error()  # the pooler is left out, and the weights of the LM head are not used
    tokenizer = AutoTokenizer.from_pretrained(model_directory)
    model = EsmModel.from_pretrained(model_directory, add_pooling_layer=False, attn_implementation="sdpa").eval()
    loaded(note)
    began = time.perf_counter()
    ids, texts = read_fasta(Path(fasta))
    directory = Path(out)
    directory.mkdir(parents=True, exist_ok=True)
    with (
        torch.no_grad(),
        open(directory / "rows.f32", "wb", buffering=0) as rows,
        open(directory / "ids.txt", "w", encoding="utf-8") as names,
    ):
        for members in batches([len(text) for text in texts], int(tokens)):
            block = tokenizer([texts[n] for n in members], padding=True, return_tensors="pt")
            x_BLD = model(**block).last_hidden_state
            means = [x_BLD[k, 1 : len(texts[n]) + 1].mean(0) for k, n in enumerate(members)]
            rows.write(torch.stack(means).numpy().tobytes())
            names.writelines(f"{ids[n]}\n" for n in members)
    note["work"] = time.perf_counter() - began


def read_fasta(path: Path) -> tuple[list[str], list[str]]:
    """Return ids and sequences."""
    ids: list[str] = []
    parts: list[list[str]] = []
    with open(path, encoding="utf-8") as file:
        for line in file:
            if line.startswith(">"):
                ids.append(line[1:].split()[0])
                parts.append([])
            else:
                parts[-1].append(line.strip())
    return ids, ["".join(lines) for lines in parts]


def batches(lengths: list[int], tokens: int) -> list[list[int]]:
    """Yield the members of each batch; see `transformers`."""
    if not tokens:
        return [list(range(n, min(n + FILE_ORDER, len(lengths)))) for n in range(0, len(lengths), FILE_ORDER)]
    groups: list[list[int]] = [[]]
    for n in sorted(range(len(lengths)), key=lengths.__getitem__):
        if groups[-1] and (len(groups[-1]) + 1) * (lengths[n] + 2) > tokens:
            groups.append([])
        groups[-1].append(n)
    return groups


def main() -> None:
    """Run one program, and write the note also after an error."""
    file, program, *arguments = sys.argv[1:]
    note: Note = {}
    try:
        if program == "esmshard":
            esmshard(note, arguments)
        else:
            {"fair-esm": fair_esm, "transformers": transformers}[program](note, *arguments)
    finally:
        if "with_model" in note:
            note["above_model"] = _status("VmHWM") - note["with_model"]
        Path(file).write_text(json.dumps(note), encoding="utf-8")


if __name__ == "__main__":
    main()
