"""A certificate of numerical parity: a model here against fair-esm and `transformers`, and alone against batches.

The criterion is in `esmshard.verify.comparison`.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from esmshard import __version__
from esmshard.batch import pack
from esmshard.checkpoint.compare import UBIQUITIN
from esmshard.data.fasta.fasta_reader import Record, read_fasta
from esmshard.data.fasta.symbols import shown
from esmshard.errors import InputError, UsageError
from esmshard.files import replacing, sha256
from esmshard.joined_chains import BETWEEN
from esmshard.model.attention import kernel_name
from esmshard.model.config import ModelConfig
from esmshard.model.contacts import ContactAccumulators
from esmshard.model.families.family_registry import peers_of
from esmshard.model.families.peer import AbsentError, MakePeer, Outputs, version
from esmshard.model.trunk import Trunk
from esmshard.model.weights import open_weights, recorded
from esmshard.model.weights.open_weights import Weights
from esmshard.model.weights.origin import identity
from esmshard.predict.writers import check
from esmshard.progress import say
from esmshard.verify import golden as golden_values
from esmshard.verify.comparison import TOLERANCE, Comparison, difference
from esmshard.vocab import encode

FORMAT, VERSION = "esmshard-certificate", 1
RECORDS = 8
"""The records of a user's FASTA file that are compared, from its start."""
LONGEST = 2046
"""The most residues of a record: fair-esm and `transformers` hold maps of L x L for every head."""

_INSULIN_B = "FVNQHLCGSHLVEALYLVCGERGFFYTPKT"
_LYSOZYME = (
    "KVFGRCELAAAMKRHGLDNYRGYSLGNWVCAAKFESNFNTQATNRNTDGSTDYGILQINSRWWCNDGRTPGSRNLCNIPCSALLSSDITASVNCAKKIVSDGNGMNAWVAWRN"
    "RCKGTDVQAWIRGCRL"
)
_GFP = (
    "MSKGEELFTGVVPILVELDGDVNGHKFSVSGEGEGDATYGKLTLKFICTTGKLPVPWPTLVTTFSYGVQCFSRYPDHMKQHDFFKSAMPEGYVQERTIFFKDDGNYKTRAEVK"
    "FEGDTLVNRIELKGIDFKEDGNILGHKLEYNYNSHNVYIMADKQKNGIKVNFKIRHNIEDGSVQLADHYQQNTPIGDGPVLLPDNHYLSTQSALSKDPNEKRDHMVLLEFVTA"
    "AGITHGMDELYK"
)
PROTEINS = {
    "one-residue": "M",
    "insulin-b": _INSULIN_B,
    "ubiquitin": UBIQUITIN,
    "ubiquitin-rare-letters": "MQIFVKTLTGKBITLEVEPSDUIENVKAKIQDKEGIPPZQQRLIFAGKQLEDGOTLSDYNIQKESTXHLVLRLRGG",
    "lysozyme": _LYSOZYME,
    "gfp": _GFP,
    "fusion": 2 * (_GFP + _LYSOZYME + UBIQUITIN) + _GFP,
}
"""The sequences for comparisons by default: 1 to 1,124 residues, with B, O, U, X and Z."""


@dataclass
class Certificate:
    """The comparisons of a model, their sequences, and the quantities that were not compared."""

    facts: dict[str, Any]
    """The model, the device and the versions; see `as_json`."""
    comparisons: list[Comparison] = field(default_factory=list)
    not_compared: list[str] = field(default_factory=list)
    """The quantities that were not compared, one sentence each."""

    @property
    def failures(self) -> list[Comparison]:
        """The comparisons that are not within tolerance."""
        return [one for one in self.comparisons if not one.passed]

    def as_json(self) -> dict[str, Any]:
        """Return the content of the certificate's file."""
        rows = [asdict(one) | {"passed": one.passed} for one in self.comparisons]
        for row in rows:  # JSON cannot hold NaN and infinity as numbers.
            row |= {k: str(v) for k, v in row.items() if isinstance(v, float) and not math.isfinite(v)}
        head = {"format": FORMAT, "version": VERSION, "date": datetime.now(UTC).isoformat(timespec="seconds")}
        verdict = {"passed": not self.failures, "not_compared": self.not_compared, "comparisons": rows}
        return head | self.facts | verdict

    def as_text(self) -> str:
        """Return a table for users, with the worst layer of embeddings."""
        facts = self.facts
        model, files, shape = facts["model"], facts["model"]["files"], facts["model"]["architecture"]
        lines = [
            f"model     {model['name']}: {shape['n_layers']} layers, dim {shape['dim']}, {shape['n_heads']} heads",
            *(f"sha256    {entry['sha256']}  {name}" for name, entry in files.items()),
            f"computed  {facts['dtype']} on {facts['device']}, attention {facts['kernel']}; "
            + ", ".join(f"{name} {number}" for name, number in facts["versions"].items() if number),
            f"compared  {len(facts['sequences'])} sequences of "
            f"{min(facts['sequences'].values())} to {max(facts['sequences'].values())} residues",
            "",
            f"{'against':36} {'what':26} {'absolute':>9} {'relative':>9} {'magnitude':>9}",
        ]
        for one in self._worst():
            what = one.what if one.layer is None else f"{one.what} (layer {one.layer})"
            lines.append(
                f"{one.against:36} {what:26} {one.absolute:9.1e} {one.relative:9.1e} {one.magnitude:9.3g}  "
                f"{'pass' if one.passed else 'FAIL'}"
            )
        bounds = " and ".join(f"{bound:g}" for bound in sorted({one.tolerance for one in self.comparisons}))
        lines += ["", f"tolerance {bounds}: absolute for contacts, else relative to each channel"]
        lines += [f"not compared: {text}" for text in self.not_compared]
        return "\n".join(lines)

    def verdict(self) -> str | None:
        """Return one sentence if a comparison is not within tolerance; else None."""
        failed = self.failures
        if not failed:
            return None
        worst = max(failed, key=lambda one: (math.isnan(one.relative), one.relative))
        layer = "" if worst.layer is None else f" of layer {worst.layer}"
        return (
            f"{self.facts['model']['name']}: {len(failed)} of {len(self.comparisons)} comparisons are not within "
            f"{worst.tolerance:g}; the worst are the {worst.what}{layer} against {worst.against}, which differ by "
            f"{worst.absolute:.1e} (relative {worst.relative:.1e}) in {worst.record}; do not mix numbers of the two"
        )

    def _worst(self) -> list[Comparison]:
        """Return one comparison for each quantity: the worst of its layers."""
        found: dict[tuple[str, str], Comparison] = {}
        for one in self.comparisons:
            before = found.setdefault((one.against, one.what), one)
            if not one.relative <= before.relative:  # written so that NaN is the worst
                found[one.against, one.what] = one
        return list(found.values())


@torch.no_grad()
def certify(
    model: str,
    out: Path | None,
    *,
    fasta: Path | None = None,
    golden: Path | None = None,
    overwrite: bool = False,
    peers: Mapping[str, MakePeer] | None = None,
) -> Certificate:
    """Compare a model with its peers and with itself in other batches, in fp32 on the first GPU, else the CPU.

    Args:
        model: see `esmshard.model.weights.open_weights.read`.
        out: JSON file to write; None writes none.
        fasta: compare on the first RECORDS records of this file instead of PROTEINS.
        golden: file of golden values (`esmshard.verify.golden`). If it exists, the model is compared with it. Otherwise
            it is written, unless another comparison fails. Everything is computed on the CPU, whose values they are.
        overwrite: replace `out`.
        peers: functions that make the other libraries' models; by default those of the model's family.

    Raises:
        InputError: a model or FASTA file cannot be used, or weights are not those that were recorded. A difference is
            no error: see `Certificate.verdict`.
        UsageError: `golden` beside `fasta`, since golden values are those of the built-in proteins.
    """
    if golden is not None and fasta is not None:
        raise UsageError("--golden: golden values are those of the built-in proteins; leave --fasta out")
    if out is not None:
        check(out, overwrite=overwrite)
    found = open_weights.read(model)
    if changed := recorded.altered(found.files, sha256):
        raise InputError(changed)
    device = open_weights.default_device() if golden is None else torch.device("cpu")
    known = identity(found, model)
    skipped: list[str] = []
    records = list(_records(fasta, found.config, skipped))
    certificate = Certificate(_facts(known, found, device, records), not_compared=skipped)
    before = None
    if golden is not None and golden.exists():
        before = golden_values.read(golden, certificate.facts["model"]["architecture"])
    certificate.not_compared += _outside(found, device)
    parts = [part for part in ("lm_head", "contact_head") if part not in found.unlearned]

    esm = open_weights.build(found, device).eval()
    every = list(range(len(records)))
    alone = _run(esm, records, [[n] for n in every])

    def compare(against: str, theirs: Mapping[int, Outputs]) -> None:
        certificate.comparisons += _compare(against, parts, records, alone, theirs)

    compare("itself, all in one pack", _run(esm, records, [every]))
    compare("itself, longest first, packs of two", _run(esm, records, list(_twos(records))))
    compare("itself, padded attention", _run(esm, records, [every], padded=True))
    del esm
    peers = peers_of(found.config) if peers is None else peers
    if not peers:
        certificate.not_compared.append("another library: none has models of this family")
    for name, make in peers.items():
        try:
            peer = make(found, device)
        except AbsentError as absent:
            certificate.not_compared.append(f"{name}: {absent.reason}; not compared ({absent.fix})")
            continue
        theirs = dict(peer.run(records))
        compare(peer.name, theirs)
        left = [records[n].id for n in every if theirs[n].contacts is None]
        if left and "contact_head" in parts:
            certificate.not_compared.append(
                f"contacts of {', '.join(left)}: {peer.name} would need too much memory for its maps"
            )
        del peer, theirs  # Only one peer is in memory at a time.
    if golden is not None:
        values = golden_values.sample({record.id: alone[n] for n, record in enumerate(records)}, parts)
        _compare_or_write(golden, before, values, certificate, found.files)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        with replacing(out) as file:
            file.write(json.dumps(certificate.as_json(), indent=1, allow_nan=False) + "\n")
    return certificate


def _compare_or_write(
    golden: Path,
    before: tuple[dict[str, Any], golden_values.Values] | None,
    values: golden_values.Values,
    certificate: Certificate,
    files: Sequence[Path],
) -> None:
    """Compare with the golden values that were read; or, if there are none and nothing failed, write them."""
    if before is not None:
        compared, without = golden_values.compare(certificate.facts["model"], values, golden, *before)
        certificate.comparisons += compared
        certificate.not_compared += without
    elif not certificate.failures:
        golden_values.write(golden, certificate.facts, files, values)
        say(f"{golden}: written, the golden values of {certificate.facts['model']['name']}")


def _facts(known: Mapping[str, Any], found: Weights, device: torch.device, records: Sequence[Record]) -> dict[str, Any]:
    return {
        "model": {
            "name": known["name"],
            "architecture": found.config.recorded() | {"n_parameters": found.config.n_parameters},
            "files": known["files"],
            "without_trained_weights": list(found.unlearned),
        },
        "dtype": "float32",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "kernel": kernel_name(device, torch.float32),
        "versions": {
            "esmshard": __version__,
            "torch": str(torch.__version__),
            "fair-esm": version("fair-esm"),
            "transformers": version("transformers"),
        },
        "tolerance": {"relative_to_channel": TOLERANCE, "contacts_absolute": TOLERANCE},
        "sequences": {record.id: len(record.sequence) for record in records},
    }


def _records(fasta: Path | None, config: ModelConfig, skipped: list[str]) -> Iterator[Record]:
    """Yield the records to compare on. Records that are too long for the model, or for a peer's memory, are reported in
    `skipped`.
    """
    most = LONGEST if config.most_tokens is None else config.most_tokens - 2
    given = [Record(name, name, text) for name, text in PROTEINS.items()]
    if fasta is not None:
        given = list(islice(read_fasta(fasta), RECORDS))
        if joined := next((record.id for record in given if BETWEEN in record.sequence), None):
            raise InputError(f"{fasta}: record '{shown(joined)}' has several chains; give records of one chain")
    fitting = [record for record in given if len(record.sequence) <= most]
    long = [f"{record.id} ({len(record.sequence)} residues)" for record in given if record not in fitting]
    if not fitting:
        raise InputError(
            f"{fasta}: each of its first {len(given)} records has more than {most} residues; give shorter ones"
        )
    if long:
        why = (
            "is the longest that is compared" if config.most_tokens is None else "is the longest that this model takes"
        )
        skipped.append(f"{', '.join(long)}: {most} residues {why}")
    yield from fitting


def _outside(found: Weights, device: torch.device) -> list[str]:
    """List the quantities that no comparison covers."""
    outputs = {"lm_head": "logits", "contact_head": "contacts"}
    said = [f"{what}: the model has no trained {part}" for part, what in outputs.items() if part in found.unlearned]
    said += [f"{part}: weights of another task, which are not used here" for part in found.left_out]
    if found.head:
        said.append("the fine-tuned head: it is esmshard's own, and neither library has it")
    half = kernel_name(device, torch.bfloat16)
    kernel = "" if half == kernel_name(device, torch.float32) else f", which attends by another kernel here ({half})"
    return [*said, f"half precision: all arithmetic is fp32{kernel}"]


def _twos(records: Sequence[Record]) -> Iterator[list[int]]:
    order = sorted(range(len(records)), key=lambda n: -len(records[n].sequence))
    for first in range(0, len(order), 2):
        yield order[first : first + 2]


def _run(
    model: Trunk, records: Sequence[Record], packs: Sequence[Sequence[int]], *, padded: bool = False
) -> dict[int, Outputs]:
    """Compute the outputs of our model for each record, packed in these packs."""
    for layer in model.layers:
        layer.self_attn.padded = padded  # type: ignore[union-attr]
    layers = range(model.config.n_layers + 1)
    regression = model.contact_head.regression
    found: dict[int, Outputs] = {}
    for members in packs:
        batch = pack([encode(records[n].sequence) for n in members], [records[n].id for n in members])
        there = batch.to(next(model.parameters()).device)
        sums = ContactAccumulators(len(batch), regression.weight, regression.bias)
        everywhere = torch.arange(batch.bounds[-1], device=there.tokens_T.device)
        said = model(there, layers=layers, logits_at=everywhere, on_attention=sums.add)
        hidden = [said.representations[layer] for layer in layers]
        contacts = [logits_1LL[0].sigmoid().cpu() for logits_1LL in sums.logits()]
        residues = [there.residues(x_TD) for x_TD in hidden]
        for k, n in enumerate(members):
            own = slice(batch.bounds[k], batch.bounds[k + 1])
            found[n] = Outputs(
                batch.tokens_T[own].tolist(),
                [x_TD[own].cpu() for x_TD in hidden],
                [x_NLD[k].mean(0).cpu() for x_NLD in residues],
                said.logits_PV[own].cpu(),
                contacts[k],
            )
    return found


def _compare(
    against: str,
    parts: Sequence[str],
    records: Sequence[Record],
    ours: Mapping[int, Outputs],
    theirs: Mapping[int, Outputs],
) -> Iterator[Comparison]:
    """Compare every quantity that the trained `parts` compute, over all records."""
    for n, record in enumerate(records):
        if ours[n].tokens != theirs[n].tokens:
            raise InputError(
                f"{record.id}: {against} makes other tokens of this sequence, so nothing else can be compared"
            )

    def over(what: str, layer: int | None = None) -> Comparison:
        pairs = [
            (record.id, _of(ours[n], what, layer), _of(theirs[n], what, layer)) for n, record in enumerate(records)
        ]
        both = [(name, a, b) for name, a, b in pairs if a is not None and b is not None]
        if what != "mean embeddings":
            return difference(against, what, layer, both)
        # A mean is smaller than its terms, but has their rounding errors.
        return difference(against, what, layer, both, [one.layers[layer or 0] for one in theirs.values()])

    if "lm_head" in parts:
        yield over("logits")
    layers = range(len(ours[0].layers))
    yield from (over("embeddings", layer) for layer in layers)
    yield from (over("mean embeddings", layer) for layer in layers)
    if "contact_head" in parts and any(one.contacts is not None for one in theirs.values()):
        yield over("contacts")


def _of(said: Outputs, what: str, layer: int | None) -> torch.Tensor | None:
    """Return a quantity as [places, channels]."""
    if what == "contacts":
        return None if said.contacts is None else said.contacts.flatten()[:, None]
    if what == "logits":
        return said.logits
    assert layer is not None
    return said.layers[layer] if what == "embeddings" else said.means[layer][None]
