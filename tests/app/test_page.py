"""The page of `esmshard app`, without a browser: who may see what, answers and files, and jobs that are commands."""

import re
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from starlette.testclient import TestClient
from structure_texts import chain, pdb

from esmshard.app import results, server
from esmshard.app.forms import KINDS
from esmshard.app.jobs import Job, Jobs
from esmshard.cli.cluster import app as command
from esmshard.errors import UsageError

TOKEN, LIMIT = "secret", 100_000
WILD_TYPE = "MKTAYIAKQRQISFVKSHFSRQ"


def browser(pages: Path, password: str | None = None) -> TestClient:
    """A browser that has opened the page, or only asked for it if there is a password."""
    made = server.app(pages, TOKEN, password, 8050, LIMIT, ["127.0.0.1"])
    client = TestClient(made, "http://127.0.0.1:8050")
    client.get("/" if password else f"/?token={TOKEN}")
    return client


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    with browser(tmp_path) as client:
        yield client


def job_of(address: object) -> str:
    found = re.search(r"/job/(\w+)", str(address))
    assert found is not None
    return found[1]


def ended(client: TestClient, job: str, seconds: float = 100) -> str:
    """Wait until a job has ended, and return the page's part about the job."""
    for _ in range(int(seconds / 0.2)):
        text = client.get(f"/job/{job}/live").text
        if "data-ended" in text:
            return text
        time.sleep(0.2)
    raise AssertionError(text)


def submit(client: TestClient, kind: str, files: dict[str, tuple[str, str]], **answers: str) -> str:
    values = {field.name: field.default for field in KINDS[kind].fields} | answers
    posted = client.post(f"/new/{kind}", data=values, files={"none": ("", b""), **files})
    assert posted.status_code == 200, posted.text
    return job_of(posted.url)


def test_answers_become_commands() -> None:
    values = {field.name: field.default for field in KINDS["labels"].fields}
    values |= {"data": "jobs/1/data/x.csv", "target": "a: b", "task": "residue task.classes=null", "by": "cluster"}
    split, finetune, predict = KINDS["labels"].words(values, "jobs/1")
    assert split == ["split", "jobs/1/data/x.csv", "-o", "jobs/1/sets", "--by", "cluster", "--overwrite"]
    assert finetune[:3] == ["finetune", "residue", "task.classes=null"]
    assert "task.kind=number" in finetune
    assert 'data.target="No"' in KINDS["labels"].words(values | {"target": "No"}, "jobs/1")[1]
    assert {'data.target="a: b"', "data.labels=jobs/1/data/x.csv", "out=jobs/1/run"} <= {*finetune}
    assert predict[0] == "predict"
    labels = KINDS["labels"].words(values | {"labels": "jobs/1/labels/y.csv"}, "jobs/1")[1]
    assert "data.labels=jobs/1/labels/y.csv" in labels
    rank = KINDS["rank"].words({field.name: field.default for field in KINDS["rank"].fields}, "jobs/1")[0]
    assert not any(word.startswith(("data.target", "data.mutant")) for word in rank)


def test_only_who_has_the_token_sees_the_page(tmp_path: Path) -> None:
    made = server.app(tmp_path, TOKEN, None, 8050, LIMIT, ["127.0.0.1"])
    stranger = TestClient(made, "http://127.0.0.1:8050")
    for path in ("/", "/static/app.js", "/new/rank", "/?token=wrong", "/job/1/live"):
        assert stranger.get(path).status_code == 403
    assert stranger.post("/new/plan").status_code == 403
    assert not list((tmp_path / "jobs").iterdir())
    opened = stranger.get(f"/?token={TOKEN}")
    assert (opened.status_code, str(opened.url)) == (200, "http://127.0.0.1:8050/")
    assert "no-store" in opened.headers["cache-control"]
    assert stranger.get("/static/app.js").status_code == 200
    stranger.cookies.delete("esmshard_session_8050")
    assert stranger.get("/").status_code == 403
    assert TestClient(made, "http://elsewhere.org").get(f"/?token={TOKEN}").status_code == 400


def test_a_password_stands_for_the_token(tmp_path: Path) -> None:
    client = browser(tmp_path, "open sesame")
    assert "Password" in client.get("/").text
    assert client.get(f"/?token={TOKEN}").status_code == 403
    assert client.post("/login", data={"password": "wrong"}).status_code == 401
    assert client.get("/").status_code == 403
    assert client.post("/login", data={"password": "open sesame"}).status_code == 200
    assert "Your jobs" in client.get("/").text
    with pytest.raises(UsageError, match="--password"):
        command(tmp_path, host="0.0.0.0", password=None)


def test_a_job_is_a_command_whose_results_only_its_browser_sees(tmp_path: Path) -> None:
    with browser(tmp_path) as client:
        job = submit(client, "score", {}, sequence_text=WILD_TYPE)
        line = f"esmshard score starter jobs/{job}/sequence/sequence.fasta --all-singles -o jobs/{job}/scores.csv"
        assert line in client.get(f"/job/{job}").text
        text = ended(client, job)
        assert 'data-state="done"' in text
        assert "data:image/png;base64," in text
        scores = client.get(f"/job/{job}/file/scores.csv?save=1")
        assert "attachment" in scores.headers["content-disposition"]
        assert scores.text == (tmp_path / "jobs" / job / "scores.csv").read_text()
        assert len(scores.text.splitlines()) == 1 + 19 * len(WILD_TYPE)
        assert f"/job/{job}" in client.get("/").text

        other = TestClient(client.app, "http://127.0.0.1:8050")
        assert f"/job/{job}" not in other.get(f"/?token={TOKEN}").text
        for path in ("", "/live", "/file/scores.csv", "/file/sequence/sequence.fasta"):
            assert other.get(f"/job/{job}{path}").status_code == 404
        for action in ("start", "stop", "remove"):
            assert other.post(f"/job/{job}/{action}").status_code == 404
        model = {"sequence_text": WILD_TYPE, "model": f"jobs/{job}"}
        assert "no run of this page" in other.post("/new/score", data=model).text

        (tmp_path / "secret.txt").write_text("x")
        for path in ("%2e%2e/%2e%2e/secret.txt", "/etc/hostname", "sequence"):
            assert client.get(f"/job/{job}/file/{path}").status_code == 404
        assert client.post(f"/job/{job}/remove").status_code == 200
        assert not (tmp_path / "jobs" / job).exists()


def test_wrong_answers_are_refused_beside_their_question(client: TestClient, tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("x")
    wrong = {
        "model": ("/etc", "../other", "x.txt/..", "--help", "${HOME}", "no-model"),
        "format": ("exe", ""),
        "colour": ("a" * 201, "-x", "$x", "a\tb"),
    }
    for name, values in wrong.items():
        for value in values:
            fields = {"model": "starter", "format": "csv", "colour": ""} | {name: value}
            answer = client.post("/new/embed", data=fields, files={"data": ("x.fasta", f">a\n{WILD_TYPE}\n")})
            assert answer.status_code == 422, (name, value)
            assert answer.text.count('role="alert">') == 1
            assert re.search(rf'id="{name}-hint">[^<]*</p>\s*<p class="error"', answer.text)
    assert "choose a file" in client.post("/new/embed", data={"model": "starter", "format": "csv"}).text
    rank = {field.name: field.default for field in KINDS["rank"].fields} | {"propose": "0"}
    assert "whole number" in client.post("/new/rank", data=rank).text
    assert client.post("/new/nothing").status_code == 404
    too_large = client.post("/new/embed", files={"data": ("x.fasta", "A" * LIMIT)})
    assert too_large.status_code == 413
    assert "--limit" in too_large.text


def test_names_of_files_stay_inside_the_job(client: TestClient, tmp_path: Path) -> None:
    for name in ("../../../evil.fasta", "-o.fasta", "..fasta", "a b$c.fasta"):
        answer = client.post("/new/embed", data={"model": "", "format": "csv"}, files={"data": (name, ">a\nMK\n")})
        assert answer.status_code == 422  # no model
    saved = [path.relative_to(tmp_path).parts for path in tmp_path.rglob("*") if path.name != "job.json"]
    saved = [parts for parts in saved if len(parts) > 3]
    assert all(parts[::2] == ("jobs", "data") for parts in saved)
    assert {parts[3] for parts in saved} == {"evil.fasta", "o.fasta", "fasta", "a_b_c.fasta"}


def test_a_table_is_checked_before_it_runs(client: TestClient, tmp_path: Path) -> None:
    """A sentence of the command stands beside its question; the files are kept, and the answer is corrected."""
    rows = "".join(f"{letter}{n}C,{n % 5}\n" for n, letter in enumerate(WILD_TYPE, 1))
    files = {"table": ("my table.csv", f"mutant,score\n{rows}"), "wild_type": ("w.fasta", f">w\n{WILD_TYPE}\n")}
    job = submit(client, "rank", files, target="sore", recipe="variants-few")
    assert "has no column" in ended(client, job)
    form = client.get(f"/new/rank?job={job}").text
    assert re.search(r'id="target-hint">[^<]*</p>\s*<p class="error" role="alert">my_table.csv: has no column', form)
    assert "kept: my table.csv" in form
    values = {field.name: field.default for field in KINDS["rank"].fields} | {"recipe": "variants-few"}
    assert job_of(client.post(f"/new/rank?job={job}", data=values).url) == job
    text = ended(client, job)
    assert 'data-state="checked"' in text
    assert "22 rows, 0 left out" in text
    assert not (tmp_path / "jobs" / job / "run").exists()
    assert client.post(f"/new/rank?job={job}", data=values | {"propose": "0"}).status_code == 422
    assert ">Start<" not in client.get(f"/job/{job}/live").text  # The check does not hold for the new answers.


def test_jobs_run_one_after_the_other_and_can_be_stopped(client: TestClient) -> None:
    long, short = (submit(client, "score", {}, sequence_text=WILD_TYPE * n) for n in (60, 1))
    assert 'data-state="waiting"' in client.get(f"/job/{short}/live").text
    for _ in range(300):
        if 'data-state="running"' in client.get(f"/job/{long}/live").text:
            break
        time.sleep(0.1)
    assert "stop it first" in client.post(f"/job/{long}/remove").text
    assert client.post(f"/job/{long}/stop").status_code == 200
    assert 'data-state="stopped"' in ended(client, long)
    assert 'data-state="done"' in ended(client, short)


def test_jobs_are_found_again_when_the_server_starts(tmp_path: Path) -> None:
    states = {"1": "running", "2": "done", "3": "checking"}
    for name, state in states.items():
        (tmp_path / "jobs" / name).mkdir(parents=True)
        job = Job(name, "me", "score", tmp_path / "jobs" / name, state=state)  # type: ignore[arg-type]
        job.save()
    (tmp_path / "jobs" / "4").mkdir()
    (tmp_path / "jobs" / "4" / "job.json").write_text("{}")
    jobs = Jobs(tmp_path)
    assert {job.id: job.state for job in jobs.of("me")} == {"1": "stopped", "2": "done", "3": "stopped"}
    assert jobs.get("1", "you") is None
    jobs.close()


def test_pairs_are_drawn_between_the_atoms_of_the_structure(tmp_path: Path) -> None:
    job = Job("1", "me", "contacts", tmp_path / "jobs" / "1", values={"data": "jobs/1/data/1abc.pdb"})
    (job.directory / "data").mkdir(parents=True)
    lines = chain(WILD_TYPE)
    (job.directory / "data" / "1abc.pdb").write_text(pdb(lines))
    map_LL = np.zeros((len(WILD_TYPE),) * 2, np.float32)
    for i, j, p in ((0, 10, 0.9), (2, 12, 0.4), (0, 3, 1.0)):  # the last pair is too near in the sequence
        map_LL[i, j] = map_LL[j, i] = p
    np.savez(job.directory / "contacts.npz", **{"1abc_A": map_LL})
    found = results.pairs(job, "1abc_A", 0.3)
    assert [(pair["i"], pair["j"], pair["p"]) for pair in found["pairs"]] == [(1, 11, 0.9), (3, 13, 0.4)]
    assert found["structure"] == "data/1abc.pdb"
    ca = [line.xyz for line in lines if line.name == "CA"]
    assert [*found["pairs"][0]["ends"][0].values()] == pytest.approx(ca[0], abs=1e-3)
    assert [*found["pairs"][0]["ends"][1].values()] == pytest.approx(ca[10], abs=1e-3)
    assert results.pairs(job, "1abc_A", 0.5)["count"] == 1
    assert results.contact_map(job, "1abc_A", 0.5)[:4] == b"\x89PNG"


def test_pictures_of_plates_points_and_memory() -> None:
    wells = {"A1": ("A24G", 0.1), "H12": ("A24G:V30L", float("nan"))}
    points = np.arange(40.0).reshape(20, 2)
    memory = dict.fromkeys(
        ("parameters", "gradients", "optimizer", "gathered", "activations", "head", "workspace"), 1e9
    )
    for draw, values in (
        (results.draw_plate, (wells,)),
        (results.draw_points, (points, [str(n) for n in range(20)])),
        (results.draw_points, (points, [f"group {n}" for n in range(20)])),
        (results.draw_memory, ({"full_shard": memory}, 4e10)),
    ):
        assert results.chart(draw, *values).startswith("data:image/svg+xml;base64,")
