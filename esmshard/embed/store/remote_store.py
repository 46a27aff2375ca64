"""An embedding store in a bucket, while it is made: each part is uploaded when it is computed.

    s3://bucket/OUT/plan.json      the plan and the bounds of parts, created once by the first worker
      parts/                     as on a disk, see `esmshard.embed.store.parts`
      index/, failed.tsv         uploaded at the end
      manifest.json              the last object that is written; the store is finished once it exists

A bucket cannot rename, so the store has its final address from the beginning. A file that is made from parts has them
at `OUT.partial/`. A worker keeps what it needs in a local directory, whose `remote.json` names the address. The note of
a part has the bucket's mark of its content as `tag`, so that a part that was replaced or damaged is noticed without
reading it. No torch.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from esmshard.embed.store import part_plan
from esmshard.embed.store.embedding_store import EmbeddingStore, manifest_of, note_file, write_failed
from esmshard.embed.store.part_plan import Spec
from esmshard.errors import InputError, UsageError
from esmshard.files import read_json, replace_json, replace_text
from esmshard.progress import say
from esmshard.remote import RemoteDirectory, Stored

REMOTE = "remote.json"
OURS = ("plan.json", "manifest.json", "failed.tsv", "index/", "parts/", "work/")
"""The beginnings of the names of all objects of a store."""


class RemoteStore:
    """An unfinished embedding store in a bucket.

    Args:
        place: the address of the store.
        directory: the local directory with its plan, its index and the notes of its parts.
        keeps_parts: keep part files on this machine, too, as a file is made from them.
    """

    def __init__(self, place: RemoteDirectory, directory: Path, keeps_parts: bool) -> None:
        self.place, self._directory, self._keeps_parts = place, directory, keeps_parts
        self._notes: dict[str, dict[str, Any]] = {}
        """The notes that were read, by the names of their objects."""
        self._tags: dict[str, str] = {}
        """The bucket's marks of these objects. A note that was replaced is read again."""

    @classmethod
    def of(cls, directory: Path) -> "RemoteStore | None":
        """Return the store of a local directory; None for a store on a disk."""
        try:
            known = read_json(directory / REMOTE)
        except FileNotFoundError:
            return None
        return cls(RemoteDirectory(known["url"]), directory, known["keeps_parts"])

    def begin(self, plan: dict[str, Any]) -> dict[str, Any]:
        """Write the plan into the bucket or, if there is one, divide the rows into the same parts.

        Args:
            plan: the plan that this machine has made of its input.

        Returns:
            The plan with the parts of the bucket's plan.

        Raises:
            UsageError: if the bucket's plan is of another input.
        """
        bounds = self._directory / "index" / "bounds.npy"
        text: dict[str, Any] = {**plan, "bounds": np.load(bounds).tolist()}
        text["digest"] = part_plan.digest(text)
        if not self.place.create("plan.json", json.dumps(text).encode()):
            known = self.plan()
            if known is None:
                raise InputError(f"{self.place.url}: another worker has removed it meanwhile; run the command again")
            if known["input"] != plan["input"]:
                raise UsageError(
                    f"{plan['source']['path']}: is not what {self.place.url} was begun with "
                    f"({known['source']['path']}, {known['records']:,} records); --overwrite starts over"
                )
            np.save(bounds, np.array(known["bounds"], np.int64))
            plan = {**plan, "parts": known["parts"]}
            plan["digest"] = part_plan.digest(plan)
            replace_json(self._directory / "plan.json", plan)
        replace_json(self._directory / REMOTE, {"url": self.place.url, "keeps_parts": self._keeps_parts})
        return plan

    def plan(self) -> dict[str, Any] | None:
        """Read the plan in the bucket; None if there is none."""
        data = self.place.read("plan.json").get("plan.json")
        if data is None:
            return None
        try:
            plan: dict[str, Any] = json.loads(data.decode())
            if (plan["format"], plan["version"]) != (part_plan.FORMAT, part_plan.VERSION):
                raise UsageError(f"{self.place.url}: was begun by another version of esmshard; --overwrite starts over")
            if plan["digest"] != part_plan.digest(plan):
                raise ValueError
            Spec.of(plan)
        except UsageError:
            raise
        except (ValueError, KeyError, TypeError):
            raise InputError(f"{self.place.url}/plan.json: is damaged; --overwrite starts over") from None
        return plan

    def pull(self) -> None:
        """Read the notes of parts that any worker has finished. A part that is missing, or is not what was uploaded, is
        computed again, with a message.
        """
        listed = self.place.listing("parts")
        keys = [key for key in listed if key.endswith(".json")]
        new = [key for key in keys if key not in self._notes or self._tags[key] != listed[key].tag]
        for key, data in self.place.read(*new).items():
            try:
                note = json.loads(data.decode())
                note["file"], note["bytes"], note["tag"]
                self._notes[key], self._tags[key] = note, listed[key].tag
                self._note_file(key).unlink(missing_ok=True)
            except (ValueError, KeyError, TypeError):
                self._forget(key, "its note is damaged")
        for key in [key for key in keys if key in self._notes]:
            note = self._notes[key]
            file = self._note_file(key)
            if fault := _fault(note, listed.get(f"parts/{note['file']}")):
                self._forget(key, fault)
            elif not file.exists():
                replace_text(file, json.dumps(note, indent=1) + "\n")
        for key in self._notes.keys() - listed.keys():  # another worker has found a fault
            del self._notes[key]
            self._note_file(key).unlink(missing_ok=True)

    def is_done(self, part: int) -> bool:
        """Whether any worker has finished a part; asks the bucket for this part only."""
        return self.place.look(f"parts/{part:06d}.json") is not None

    def publish(self, part: int, note: dict[str, Any], file: Path) -> bool:
        """Upload a part and its note. Returns False if another worker has finished the part before.

        Args:
            part: the number of the part.
            note: the note, without the bucket's mark.
            file: the file of the part, which is removed from this disk unless a file is made of the parts.
        """
        key, there = f"parts/{part:06d}.json", f"parts/{file.name}"
        note = {**note, "tag": self.place.upload(file, there).tag}
        text = json.dumps(note, indent=1) + "\n"
        if self.is_done(part) or not self.place.create(key, text.encode()):
            self.place.remove([there])
            return False
        replace_text(note_file(self._directory, part), text)
        if not self._keeps_parts:
            file.unlink()
        return True

    def fetch_parts(self) -> None:
        """Copy the part files that other workers have computed to this disk."""
        for note in self._notes.values():
            file = self._directory / "parts" / note["file"]
            if not file.exists():
                self.place.download(f"parts/{note['file']}", file)

    def forget(self, part: int) -> None:
        """Remove the note of a part, which is then computed again."""
        self._forget(f"parts/{part:06d}.json", "its rows are not what was computed")

    def seal(self) -> None:
        """Write what is missing for a finished store; all parts have been compared by `pull`."""
        with_notes = EmbeddingStore(self._directory, unfinished=True)
        (self._directory / "failed.tsv").unlink(missing_ok=True)
        write_failed(with_notes, self._directory / "failed.tsv")
        manifest = manifest_of(with_notes)
        for name in ("failed.tsv", *(f"index/{name}" for name in manifest["index"])):
            if (file := self._directory / name).exists():
                self.place.upload(file, name)
        self.place.write("manifest.json", (json.dumps(manifest, indent=1) + "\n").encode())

    def clean(self, manifest: dict[str, Any] | None) -> None:
        """Remove from the bucket what is no longer needed: of a finished store the plan, the notes, and parts
        of killed workers; without a manifest everything.
        """
        listed = [name for name in self.place.listing() if name.startswith(OURS)]
        kept = set()
        if manifest is not None:
            kept = {f"parts/{note['file']}" for note in manifest["parts"]}
            kept |= {name for name in listed if not name.startswith(("parts/", "work/", "plan.json"))}
        gone = [name for name in listed if name not in kept]
        self.place.remove(sorted(gone, key=lambda name: (name != "manifest.json", name != "plan.json")))

    def _forget(self, key: str, why: str) -> None:
        say(f"{self.place.url}/{key.removesuffix('.json')}: {why}; it is computed again")
        self._notes.pop(key, None)
        self.place.remove([key])
        self._note_file(key).unlink(missing_ok=True)

    def _note_file(self, key: str) -> Path:
        return self._directory / "parts" / key.rpartition("/")[2]


def _fault(note: dict[str, Any], found: Stored | None) -> str:
    """Return what is wrong with the object of a part; empty if nothing is."""
    if found is None:
        return f"{note['file']} is missing"
    if found.size != note["bytes"]:
        return f"{note['file']} has {found.size:,} bytes, {note['bytes']:,} were written"
    return "" if found.tag == note["tag"] else f"{note['file']} is not what was uploaded"
