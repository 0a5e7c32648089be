"""A real server's door: TLS, a proxy before it, what it opens and whom it calls, and what its logs tell (cases O-39, O-40, O-45)."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.live import live

ROOT = Path(__file__).parent.parent.parent
TLS = ROOT / "tests" / "support" / "tls"
CHAT = "/v1/chat/completions"
SECRET, PROMPT = "zanzibar-key-4711", "zanzibar-prompt-4711"
SMALL = ("--max-model-len", "512", "--kv-cache-memory", "64M")
COLOUR = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "paint", "parameters": COLOUR}}


def answer_of(name: str) -> dict[str, Any]:
    """A response format. Its name makes it another one."""
    return {"type": "json_schema", "json_schema": {"name": name, "schema": {**COLOUR, "title": name}}}


def test_tls() -> None:
    with live("mock", "--ssl-certfile", str(TLS / "cert.pem"), "--ssl-keyfile", str(TLS / "key.pem")) as server:
        assert server.url.startswith("https://")
        context = ssl.create_default_context(cafile=str(TLS / "cert.pem"))
        connection = http.client.HTTPSConnection("localhost", server.port, context=context, timeout=20)
        for stream in (False, True):
            body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "stream": stream}
            connection.request("POST", CHAT, json.dumps(body), {"content-type": "application/json"})
            reply = connection.getresponse()
            answer = reply.read()
            assert reply.status == 200
            assert (b"[DONE]" in answer) is stream
        assert connection.sock.version() in ("TLSv1.2", "TLSv1.3")
        connection.close()
        with pytest.raises((http.client.HTTPException, OSError)):
            server.get("/live")
        context = ssl.create_default_context(cafile=str(TLS / "cert.pem"))
        connection = http.client.HTTPSConnection("localhost", server.port, context=context, timeout=20)
        connection.request("GET", "/live")
        assert connection.getresponse().status == 200
        connection.close()


@pytest.mark.parametrize(
    "flags",
    [
        ("--ssl-certfile", "missing.pem"),
        ("--ssl-certfile", str(TLS / "cert.pem")),
        ("--ssl-certfile", str(TLS / "cert.pem"), "--ssl-keyfile", str(TLS / "encrypted.pem")),
        ("--ssl-keyfile", str(TLS / "key.pem")),
        ("--allowed-origins", "*", "--allow-credentials"),
    ],
)
def test_a_door_that_cannot_be_made_is_told_at_once(flags: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "octavo", "mock", *flags, "--port", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL)
    assert ended.returncode == 2
    assert flags[0] in ended.stderr
    assert "Traceback" not in ended.stderr


@contextlib.contextmanager
def nginx(folder: Path, ports: dict[str, int]) -> Iterator[int]:
    """nginx with the example of the guide; only its ports and folders are changed. Yields the port it listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    text = (ROOT / "docs" / "guides" / "nginx.conf").read_text()
    for old, new in {"8080;": port, "127.0.0.1:8001": ports["smollm2"], "127.0.0.1:8002": ports["story"]}.items():
        assert text.count(old) == 1
        text = text.replace(old, f"{new};" if old.endswith(";") else f"127.0.0.1:{new}")
    places = "\n".join(
        f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    text = text.replace("http {", f"http {{\naccess_log off;\n{places}\n")
    (folder / "nginx.conf").write_text(text)
    own = f"daemon off; pid {folder}/pid; error_log stderr;"
    process = subprocess.Popen(
        ["nginx", "-e", "stderr", "-p", str(folder), "-c", "nginx.conf", "-g", own], stderr=subprocess.PIPE
    )
    try:
        deadline = time.monotonic() + 10
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            assert process.poll() is None, process.stderr and process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield port
    finally:
        process.terminate()
        process.communicate(timeout=10)


def test_two_models_behind_nginx(tmp_path: Path) -> None:
    names = ("--allowed-hosts", "models.example.com")
    with (
        live("mock", "--served-model-name", "one", "--itl-ms", "100", *names) as one,
        live("mock", "--served-model-name", "two", *names) as two,
        nginx(tmp_path, {"smollm2": one.port, "story": two.port}) as port,
    ):
        headers = {"host": "models.example.com", "content-type": "application/json"}

        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)

        def ask(method: str, path: str, body: Any = None, **more: str) -> http.client.HTTPResponse:
            connection.request(method, path, body and json.dumps(body), headers | more)
            return connection.getresponse()

        for place, model in (("smollm2", "one"), ("story", "two")):
            listed = json.loads(ask("GET", f"/{place}/v1/models").read())
            assert [card["id"] for card in listed["data"]] == [model]
        refused = ask("GET", "/story/v1/models", host="evil.test")
        assert (refused.status, json.loads(refused.read())["error"]["code"]) == (403, "forbidden")
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "stream": True, "model": "one"}
        reply = ask("POST", f"/smollm2{CHAT}", body)
        assert reply.status == 200
        began, moments = time.monotonic(), []
        while reply.readline():
            moments.append(time.monotonic() - began)
        # 8 tokens, 100 ms apart: a proxy that buffers would send them together.
        assert moments[-1] - moments[0] > 0.3
        wrong = ask("POST", f"/smollm2{CHAT}", body | {"model": "two"})
        assert (wrong.status, json.loads(wrong.read())["error"]["code"]) == (404, "model_not_found")
        connection.close()


def listening_inodes() -> dict[str, str]:
    """Sockets of this machine that listen: inode -> address, or name of a Unix socket."""
    found = {}
    for kind in ("tcp", "tcp6"):
        for line in Path("/proc/net", kind).read_text().splitlines()[1:]:
            parts = line.split()
            if parts[3] == "0A":
                found[parts[9]] = parts[1]
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        parts = line.split()
        if int(parts[3], 16) & 0x10000:
            found[parts[6]] = " ".join(parts[7:]) or "an unnamed Unix socket"
    return found


def descendants(pid: int) -> list[int]:
    """A process and all that it has started."""
    children = [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    return [pid, *(one for child in children for one in descendants(child))]


def test_o39_only_the_port_listens() -> None:
    """Also with the engine in a child and the compiler of grammars in another."""
    with live("serve", *SMALL, "--engine-process") as server:
        assert server.chat("Paint.", response_format=answer_of("a"), max_tokens=20).status == 200
        processes, listening = descendants(server.process.pid), listening_inodes()
        assert len(processes) >= 3
        held = [
            listening[inode]
            for process in processes
            for descriptor in Path(f"/proc/{process}/fd").iterdir()
            if (inode := str(descriptor.readlink()).removeprefix("socket:[").rstrip("]")) in listening
        ]
    assert held == [f"0100007F:{server.port:04X}"]


def test_o39_checks_are_no_assertions() -> None:
    """Bad requests are refused alike where Python leaves assertions out."""
    bodies: list[dict[str, Any]] = [
        {"n": 0}, {"temperature": 9}, {"nope": 1}, {"messages": []}, {"messages": [{"role": "user", "content": None}]},
        {"tools": [{}]}, {"tool_choice": "required"}, {"stop": [""]}, {"max_tokens": 10**9}, {"logit_bias": {"-1": 1}},
        {"response_format": {"type": "json_schema"}}, {"top_logprobs": 1}, {"stream_options": {}}, {"best_of": 2},
        {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, {"chat_template_kwargs": {"messages": []}},
    ]  # fmt: skip
    answers = []
    for optimize in ("", "2"):
        with live("mock", env={"PYTHONOPTIMIZE": optimize}) as server:
            replies = [server.chat(**body) for body in bodies]
        answers.append([(reply.status, reply.error()["message"]) for reply in replies])
    assert answers[0] == answers[1]
    assert {status for status, _ in answers[0]} == {400}


def test_o39_nothing_that_runs_data_is_imported() -> None:
    """No pickle, no eval: no text of a client, model file or socket becomes code."""
    wrong = re.compile(
        r"^\s*(import|from)\s+(pickle|cloudpickle|dill|marshal|shelve|joblib|torch)\b|(?<![\w.\"`])(eval|exec)\(",
        re.MULTILINE,
    )
    assert wrong.search("import pickle") and wrong.search("x = eval(text)")
    for path in (ROOT / "src").rglob("*.py"):
        assert not (found := wrong.search(path.read_text(encoding="utf-8"))), (path, found)


def test_o40_a_running_server_calls_nobody_and_opens_nothing_else(smollm2: Path, tmp_path: Path) -> None:
    """Watches the system calls of a served model through all kinds of requests. Only what comes after the start-up counts."""
    trace = tmp_path / "trace"
    calls = (
        "connect,sendto,sendmsg,bind,open,openat,openat2,creat,unlink,unlinkat,rename,renameat2,mkdir,execve,fork,vfork"
    )
    under = ("strace", "-D", "-f", "-ttt", "--seccomp-bpf", "-e", f"trace={calls}", "-o", str(trace))
    kept = ("--responses-store", "--responses-store-path", str(tmp_path / "responses.sqlite"))
    with socket.create_server(("127.0.0.1", 0)) as trap, live("serve", *SMALL, *kept, under=under) as server:
        # The first grammar starts the compiler's process, once; the first body that is large a thread, which asks for its limits.
        assert server.chat("Paint.", response_format=answer_of("first"), max_tokens=20).status == 200
        began = time.time()
        inside = f"http://127.0.0.1:{trap.getsockname()[1]}"
        assert server.chat("hello", logprobs=True).status == 200
        assert server.chat("hello", chat_template_kwargs={"a": 1}).status == 200
        assert server.stream(CHAT, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4})
        assert server.complete(["a" * 300, "b"], echo=True, logprobs=2).status == 200
        for url in (
            inside,
            "http://169.254.169.254/",
            "file:///etc/passwd",
            "http://a@127.0.0.1/",
            "data:image/png;base64,AAAA",
        ):
            for part in (
                {"type": "image_url", "image_url": {"url": url}},
                {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
                {"type": "file", "file": {"file_data": url}},
            ):
                refused = server.chat([{"type": "text", "text": "what is it?"}, part])
                assert (refused.status, refused.error()["code"]) == (400, "unsupported_parameter")
                assert "type" in refused.error()["param"]
            assert server.chat(f"Fetch {url}").status == 200
        assert server.chat(temperature=9).status == 400
        assert server.get("/nothing").status == 404
        assert server.post("/tokenize", {"prompt": "x" * 20_000}).status in (200, 400)
        for path in ("/health", "/metrics", "/v1/models", "/version", "/openapi.json", "/docs", "/docs/start.js"):
            assert server.get(path).status == 200
        assert server.chat("Paint.", response_format=answer_of("second"), max_tokens=20).status == 200
        assert server.chat("Paint.", tools=[TOOL], tool_choice="required", max_tokens=40).status == 200
        first = server.post("/v1/responses", {"input": "hi", "max_output_tokens": 4}).json()
        then = {"input": "and?", "previous_response_id": first["id"], "max_output_tokens": 4}
        assert server.post("/v1/responses", then).status == 200
        assert server.request("DELETE", f"/v1/responses/{first['id']}").status == 200
        ask = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
        assert server.post("/v1/messages", ask).status == 200
        assert server.post("/v1/messages/count_tokens", {"messages": ask["messages"]}).status == 200
        asked = time.time()
        trap.settimeout(0.1)
        with pytest.raises(TimeoutError):
            trap.accept()
        server.stop()
    seen = []
    for line in trace.read_text(errors="replace").splitlines():
        parts = re.match(r"\d+ +(\d+\.\d+) (\w+)\((.*)", line)
        if parts and began <= float(parts[1]) <= asked:
            seen.append((parts[2], parts[3]))
    assert seen, "nothing was traced"
    # Sent bytes go to sockets that clients opened; a datagram would name its receiver.
    wrong = [call for call in seen if call[0] not in ("sendto", "sendmsg", "openat")]
    wrong += [call for call in seen if "sa_family" in call[1]]
    own = re.compile(rf'"(/proc/|/sys/|/dev/null"|{re.escape(str(tmp_path))}/responses\.sqlite)')
    wrong += [call for call in seen if call[0] == "openat" and not own.search(call[1])]
    assert not wrong, "\n".join(map(str, wrong))


def test_o45_secrets_and_prompts_are_told_to_nobody() -> None:
    """Keys of flags and environment, and what clients send, are in no log, no info route and no process title."""
    flags = ("--itl-ms", "20", "--enable-log-requests", "--uvicorn-log-level", "debug", "--api-key", f"name:{SECRET}")
    with live("mock", *flags, env={"HF_TOKEN": SECRET, "OPENAI_API_KEY": SECRET}) as server:
        server.key = SECRET
        headers = {"authorization": f"Bearer {SECRET}"}

        def chat(content: str, **fields: Any) -> Any:
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8, **fields}
            return server.post(CHAT, body, headers=headers)

        assert chat(PROMPT).status == 200
        assert chat(f"[error after 0] {PROMPT}").status == 500
        assert chat(f"[error after 2] {PROMPT}", stream=True).status == 200
        assert chat("x", **{PROMPT: 1}).status == 400
        assert chat("x", stop=[PROMPT], temperature=PROMPT).status == 400
        assert chat("x", user=PROMPT, cache_salt=PROMPT, request_id=PROMPT).status == 200
        assert server.post(CHAT, {}, headers={"authorization": f"Bearer {SECRET}x"}).status == 401
        assert server.post(CHAT, b"{" + PROMPT.encode(), headers=headers).status == 400
        told = [
            server.get(path, headers=headers).body.decode()
            for path in ("/metrics", "/v1/models", "/version", "/health")
        ]
        told.append(Path(f"/proc/{server.process.pid}/cmdline").read_text())
        server.stop()
    told += server.log
    assert len(server.log) > 8
    assert any("8 tokens" in line for line in server.log)
    assert "name:" not in told[4]
    for line in told:
        assert SECRET not in line
        assert PROMPT not in line
