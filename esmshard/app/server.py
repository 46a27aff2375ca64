"""The server of the page: who may see what, uploads, forms and downloads (`esmshard app`).

Whoever opens the page needs the token in its address, or the password; a cookie then stands for it. A second cookie is
the session: a browser sees only the jobs that it made. All files are inside the directory of the page.
"""

import asyncio
import hmac
import ipaddress
import os
import re
import secrets
import shutil
import socket
import tempfile
from collections.abc import Callable, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from filelock import FileLock, Timeout
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import esmshard
from esmshard.app.forms import KINDS, MODELS, RECIPES, Field, Kind
from esmshard.app.jobs import ENDED, UNUSED, Job, Jobs
from esmshard.errors import InputError, UsageError
from esmshard.io.paths import is_hub_name, size_text

HERE = Path(__file__).parent
LONGEST = 200
"""The maximum number of characters of a typed answer, except for sequences."""
LONGEST_SEQUENCE = 100_000
FILES = ("file", "files", "sequence")
"""The kinds of questions for files."""
HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline'; "
    "connect-src 'self'; frame-ancestors 'self'; form-action 'self'; base-uri 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}


class Guard:
    """Refuses requests without the token and uploads over the limit, and gives each browser a session."""

    def __init__(self, app: ASGIApp, token: str, password: str | None, port: int, limit: int) -> None:
        self.app, self.token, self.password, self.limit = app, token, password, limit
        self.cookies = f"esmshard_token_{port}", f"esmshard_session_{port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on with `session` in its state."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        request = Request(scope, receive)
        given, session = (request.cookies.get(name, "") for name in self.cookies)

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] += [(key.encode(), value.encode()) for key, value in HEADERS.items()]
            await send(message)

        response: Response | None = None
        known, length = bool(session) and self._is(given, self.token), request.headers.get("content-length", "")
        limit = self.limit if known else LONGEST_SEQUENCE
        if request.method == "POST" and not (length.isdecimal() and int(length) <= limit):
            text = f"the files are larger than {size_text(limit)}; start esmshard app with a larger --limit"
            response = page("message", 413, title="Too large", text=text)
        elif not known:
            response = await self._welcome(request)
        scope["session"] = session
        await (self.app if response is None else response)(scope, receive, answer)

    async def _welcome(self, request: Request) -> Response:
        """Return the answer for a browser without the cookie of the token."""
        if self.password is None and not self._is(request.query_params.get("token", ""), self.token):
            return page("message", 403, title="Not open", text="open the address that `esmshard app` has printed")
        if self.password is not None:
            if request.method != "POST" or request.url.path != "/login":
                return page("message", 403, title="esmshard", text="", password=True)
            if not self._is(str((await request.form(max_files=0)).get("password", "")), self.password):
                await asyncio.sleep(1)  # makes guessing slow
                return page("message", 401, title="esmshard", text="the password is wrong", password=True)
        response = RedirectResponse("/" if request.method == "POST" else request.url.path, 303)
        for name, value in zip(self.cookies, (self.token, secrets.token_hex(16)), strict=True):
            if name not in request.cookies or value == self.token:
                response.set_cookie(name, value, max_age=365 * 86400, httponly=True, samesite="lax")
        return response

    @staticmethod
    def _is(given: str, wanted: str) -> bool:
        return hmac.compare_digest(given.encode(), wanted.encode())


_TEMPLATES = Environment(
    loader=FileSystemLoader([HERE / "templates", HERE.parent / "report" / "templates"]),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.filters["size"] = size_text


def page(template: str, status: int = 200, **values: Any) -> HTMLResponse:
    """Return a page as response."""
    values = {"version": esmshard.__version__, "password": False, **values}
    text = _TEMPLATES.get_template(f"{template}.html.jinja").render(values)
    return HTMLResponse(text, status)


def app(directory: Path, token: str, password: str | None, port: int, limit: int, hosts: list[str]) -> Starlette:
    """Return the page's application for files up to `limit` bytes, in a directory that exists."""
    jobs = Jobs(directory)

    @asynccontextmanager
    async def life(_: Starlette) -> Any:
        yield
        await run_in_threadpool(jobs.close)

    def job_of(request: Request) -> Job:
        job = jobs.get(request.path_params["job"], request.scope["session"])
        if job is None:
            raise HTTPException(404)
        return job

    def home(request: Request) -> Response:
        runs = [] if password else [path.parent.relative_to(directory) for path in _reports(directory)]
        return page("home", title="esmshard", kinds=KINDS, jobs=jobs.of(request.scope["session"]), runs=runs)

    def form(request: Request) -> Response:
        kind = KINDS.get(request.path_params["kind"])
        if kind is None:
            raise HTTPException(404)
        job = jobs.get(request.query_params.get("job", ""), request.scope["session"])
        if job is not None and KINDS[job.kind] is not kind:
            raise HTTPException(404)
        return _form(request, kind, job, {} if job is None else errors_of(job))

    def _form(request: Request, kind: Kind, job: Job | None, errors: Mapping[str, str], status: int = 200) -> Response:
        mine = [job.directory / "run" for job in jobs.of(request.scope["session"])]
        offered = {
            "models": [*(run for run in mine if run.is_dir()), *MODELS],
            "recipes": [*(path for run in mine for path in sorted(run.glob("**/recipe.yaml"))[:1]), *RECIPES],
        }
        lists = {key: [str(each).removeprefix(f"{directory}/") for each in values] for key, values in offered.items()}
        address = request.url.path + ("" if job is None else f"?job={job.id}")
        values = {field.name: field.default for field in kind.fields} | ({} if job is None else job.values)
        names = {} if job is None else job.names
        return page(
            "form", status, title=kind.title, kind=kind, values=values, names=names, errors=errors, lists=lists,
            address=address, limit=limit,
        )  # fmt: skip

    async def submit(request: Request) -> Response:
        kind = KINDS.get(request.path_params["kind"])
        if kind is None:
            raise HTTPException(404)
        session = request.scope["session"]
        job = jobs.get(request.query_params.get("job", ""), session)
        if job is not None and (job.state not in (*ENDED, "new") or KINDS[job.kind] is not kind):
            raise HTTPException(404)
        if job is not None and job.state not in UNUSED:  # Its results stay.
            job = jobs.copy(job)
        answers = await request.form(max_files=1000, max_fields=100, max_part_size=LONGEST_SEQUENCE)
        job = job or jobs.create(request.path_params["kind"], session)
        job.state = "new"  # An earlier check does not hold for new answers.
        read = partial(read_answers, job, answers, lambda text, names: may_read(text, names, session))
        if errors := await run_in_threadpool(read):
            return _form(request, kind, job, errors, 422)
        jobs.check(job)
        return RedirectResponse(f"/job/{job.id}", 303)

    def may_read(text: str, names: Collection[str], session: str) -> bool:
        """Return whether a text is a name, or a path inside the page's directory that this browser may read."""
        path = (directory / text).resolve()
        if not path.exists():
            return text in names or (names is MODELS and is_hub_name(text))
        inside = path.relative_to(directory).parts if path.is_relative_to(directory) else ()
        if inside[:1] == ("jobs",):
            return len(inside) > 1 and jobs.get(inside[1], session) is not None
        return bool(inside) and password is None

    def show(request: Request) -> Response:
        job = job_of(request)
        return page("job", title=KINDS[job.kind].title, job=job)

    def live(request: Request) -> Response:
        from esmshard.app import results
        from esmshard.report.page import cell

        _TEMPLATES.filters["cell"] = cell  # for the macros of the report
        job = copy(job_of(request))  # Its state may change meanwhile.
        every = sorted(job.directory.rglob("*")) if job.state in ENDED else []  # A running job moves its files.
        files = [path for path in every if _is_result(path.relative_to(job.directory))]
        known = [(path.relative_to(job.directory).as_posix(), path.stat().st_size) for path in files]
        shown = results.of(job) | {"output": _without_places(job, job.output), "files": known}
        return page("live", job=job, errors=errors_of(job), ended=job.state in ENDED, **shown)

    def act(request: Request) -> Response:
        job, action = job_of(request), request.path_params["action"]
        if action == "remove":
            try:
                jobs.remove(job)
            except InputError as error:
                return page("message", 409, title="Not removed", text=str(error))
            return RedirectResponse("/", 303)
        if action not in ("start", "stop"):
            raise HTTPException(404)
        (jobs.start if action == "start" else jobs.stop)(job)
        return RedirectResponse(f"/job/{job.id}", 303)

    def file(request: Request) -> Response:
        return _file(job_of(request).directory, request)

    def report(request: Request) -> Response:
        if password is not None or request.path_params["path"].startswith("jobs/"):
            raise HTTPException(404)
        return _file(directory, request, only="report.html")

    def contacts(request: Request) -> Response:
        from esmshard.app import results

        job, asked = job_of(request), request.query_params
        try:
            record, threshold = asked["record"], float(asked["threshold"])
            if request.path_params["what"] == "pairs":
                return JSONResponse(results.pairs(job, record, threshold))
            return Response(results.contact_map(job, record, threshold), media_type="image/png")
        except (KeyError, ValueError, OSError, InputError):
            raise HTTPException(404) from None

    def missing(_: Request, error: Exception) -> Response:
        code = error.status_code if isinstance(error, HTTPException) else 500
        text = "there is no such page, or it belongs to another browser" if code == 404 else "this request is not valid"
        return page("message", code, title="Not found" if code == 404 else "Refused", text=text)

    guard = Middleware(Guard, token=token, password=password, port=port, limit=limit)
    return Starlette(
        routes=[
            Route("/", home),
            Route("/new/{kind}", form),
            Route("/new/{kind}", submit, methods=["POST"]),
            Route("/job/{job}", show),
            Route("/job/{job}/live", live),
            Route("/job/{job}/contacts/{what}", contacts),
            Route("/job/{job}/file/{path:path}", file),
            Route("/job/{job}/{action:str}", act, methods=["POST"]),
            Route("/report/{path:path}", report),
            Mount("/static", StaticFiles(directory=HERE / "static")),
        ],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts), guard],
        exception_handlers={HTTPException: missing},
        lifespan=life,
    )


def _reports(directory: Path) -> list[Path]:
    """Return the reports of runs that were made without the page."""
    found = {path for depth in ("*", "*/*") for path in directory.glob(f"{depth}/report.html")}
    return sorted(path for path in found if path.relative_to(directory).parts[0] != "jobs")


def _is_result(path: Path) -> bool:
    """Return whether a file of a job is offered for download: not the user's files, and not the insides of a run."""
    name, depth = path.name, len(path.parts)
    if depth == 1:
        return bool(path.suffix) and name not in ("job.json", "log.txt", "output.txt")
    return path.parts[0] in ("run", "sets") and depth == 2 and path.suffix in (".html", ".csv", ".json", ".fasta")


def _file(directory: Path, request: Request, only: str | None = None) -> Response:
    path = (directory / request.path_params["path"]).resolve()
    if not path.is_relative_to(directory.resolve()) or not path.is_file() or (only and path.name != only):
        raise HTTPException(404)
    if path.suffix in (".html", ".png") and "save" not in request.query_params:
        # A report has no scripts; `sandbox` makes sure that none would run.
        return FileResponse(path, headers={"content-security-policy": "sandbox allow-popups; img-src data:"})
    return FileResponse(path, filename=path.name)


def errors_of(job: Job) -> dict[str, str]:
    """Return the sentence with which a job failed, by the question that it is about; `""` for none of them."""
    if not job.error:
        return {}
    text, fields = job.error, KINDS[job.kind].fields
    # A sentence often begins with the path of a file, and is about another answer, such as a column.
    by_key = [field for field in fields if any(key in text for key in field.keys)]
    by_answer = [field for field in fields if field.kind == "text" and f"'{job.values.get(field.name)}'" in text]
    paths = {field.name: job.values.get(field.name) for field in fields if field.kind in FILES}
    by_path = [field for field in fields if (path := paths.get(field.name)) and path in text]
    about = [*by_answer, *by_key, *by_path]
    return {about[0].name if about else "": _without_places(job, text)}


def _without_places(job: Job, text: str) -> str:
    """Remove the directories of the job from a sentence."""
    inside = rf"(?:{re.escape(str(job.directory))}|{re.escape(job.place)})/"
    names = "|".join(re.escape(name) for name in job.values)
    return re.sub(rf"{inside}(?:(?:{names})/)?", "", text)


def read_answers(job: Job, answers: FormData, may_read: Any) -> dict[str, str]:
    """Save the files of a form in the job's directory, and its answers in the job. Return a sentence for each question
    whose answer is not valid.
    """
    errors: dict[str, str] = {}
    for field in KINDS[job.kind].fields:
        try:
            if field.kind in FILES:
                _read_files(job, field, answers)
            else:
                job.values[field.name] = _typed(field, str(answers.get(field.name, "")).strip(), may_read)
        except ValueError as error:
            errors[field.name] = str(error)
    job.save()
    return errors


def _read_files(job: Job, field: Field, answers: FormData) -> None:
    files = [each for each in answers.getlist(field.name) if isinstance(each, UploadFile) and each.filename]
    text = str(answers.get(f"{field.name}_text", "")).strip()
    if not files and not text:
        kept = job.values.setdefault(field.name, "")
        if field.needed and not kept:
            raise ValueError("choose a file" + (", or type the sequence" if field.kind == "sequence" else ""))
        return
    if len(files) > 1 and field.kind != "files":
        raise ValueError("choose one file")
    place = job.directory / field.name
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    for file in files:
        name = re.sub(r"[^\w.+-]", "_", Path(str(file.filename)).name)[-80:].lstrip(".-") or "file"
        with (place / name).open("xb") as out:
            shutil.copyfileobj(file.file, out, 1 << 20)
    if not files:
        fasta = text if text.startswith(">") else f">protein\n{text}"
        (place / "sequence.fasta").write_text(f"{fasta}\n", encoding="utf-8")
    paths = sorted(place.iterdir())
    job.values[field.name] = f"{job.place}/{field.name}" + (f"/{paths[0].name}" if len(paths) == 1 else "")
    job.names[field.name] = ", ".join(str(file.filename) for file in files) or "the typed sequence"


def _typed(field: Field, text: str, may_read: Any) -> str:
    if field.kind == "choice":
        if text not in field.choices:
            raise ValueError(f"choose one of {', '.join(field.choices.values())}")
        return text
    if field.needed and not text:
        raise ValueError("an answer is needed")
    if len(text) > LONGEST or not text.isprintable() or text.startswith("-") or "$" in text:
        raise ValueError(f"use at most {LONGEST} characters, no $, and no - at the beginning")
    if field.kind == "number" and not (text.isdecimal() and 1 <= int(text) <= field.most):
        raise ValueError(f"a whole number from 1 to {field.most:,} is needed")
    if field.kind in ("model", "recipe") and not may_read(text, MODELS if field.kind == "model" else RECIPES):
        raise ValueError(f"{text}: not the name of a {field.kind}, and no run of this page; choose one of the list")
    return text


def serve(
    directory: Path, host: str, port: int, password: str | None, limit: int, on_ready: Callable[[str], None]
) -> None:
    """Serve the page until the process is interrupted. `limit` is the maximum size of an upload, in bytes. `on_ready`
    is called with the address of the page.
    """
    is_local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    if not is_local and not password:
        raise UsageError(f"--host {host}: other machines can reach this address; pass --password, too")
    if not directory.is_dir():
        raise UsageError(f"{directory}: no such directory; make it first")
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        reason = os.strerror(error.errno).lower() if error.errno else str(error)
        raise UsageError(f"--port {port}: cannot be used on {host} ({reason}); pass another --port") from None
    (directory / "jobs").mkdir(exist_ok=True)
    # Uploads are written here first. A directory of the system may be in memory.
    tempfile.tempdir = str((directory / "jobs").resolve())
    try:
        lock = FileLock(directory / "jobs" / ".lock").acquire(timeout=0)
    except Timeout:
        raise UsageError(f"{directory}: another esmshard app uses this directory; give another one") from None
    port, token = listener.getsockname()[1], secrets.token_urlsafe(24)
    hosts = ["127.0.0.1", "localhost"] if is_local and ":" not in host else ["*"]
    made = app(directory.resolve(), token, password, port, limit, hosts)
    on_ready(f"http://{f'[{host}]' if ':' in host else host}:{port}/{'' if password else f'?token={token}'}")
    config = uvicorn.Config(made, log_level="warning", access_log=False, timeout_graceful_shutdown=3)
    with lock, suppress(KeyboardInterrupt):  # uvicorn raises it again, after the end
        uvicorn.Server(config).run(sockets=[listener])
