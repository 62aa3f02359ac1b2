"""Who is answered, and what."""

import http.client
import json
from pathlib import Path

import pytest

from fsl_sage.errors import InputError
from fsl_sage.watch.server import Server
from tests.processes import Started
from tests.watch.made_up import run_of, served


def asked(server, path="/state", method="GET", **headers):
    connection = http.client.HTTPConnection(*server.server_address, timeout=30)
    own = {
        "Host": f"127.0.0.1:{server.server_port}",
        **{name.replace("_", "-"): text for name, text in headers.items()},
    }
    connection.putrequest(method, path, skip_host=True)
    for name, text in own.items():
        if text is not None:
            connection.putheader(name, text)
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer, body


@pytest.fixture
def server(tmp_path):
    run_of(tmp_path / "watched" / "a")
    (tmp_path / "secret").write_text("not yours")
    with served(tmp_path / "watched") as server:
        yield server


def test_it_listens_on_loopback_alone(server):
    assert server.server_address[0] == "127.0.0.1"


def test_the_page_the_state_and_the_rounds_are_given(server):
    answer, page = asked(server, "/")
    nonce = answer.headers["Content-Security-Policy"].split("script-src 'nonce-")[1].split("'")[0]
    assert page.count(f'nonce="{nonce}"') == 2
    assert "$nonce" not in page
    assert asked(server, "/")[1] != page, "the word is another each time"
    state = json.loads(asked(server)[1])
    number = state["runs"][0]["number"]
    assert len(json.loads(asked(server, f"/rounds?run={number}&from=10")[1])["rounds"]) == 2


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "192.168.0.7:{port}", "", None]
)
@pytest.mark.parametrize("path", ["/", "/state"])
def test_a_request_for_another_host_is_refused(server, host, path):
    answer, body = asked(server, path, Host=host and host.format(port=server.server_port))
    assert answer.status == 403
    assert "watched" not in body


def test_localhost_is_this_host(server):
    assert asked(server, Host=f"localhost:{server.server_port}")[0].status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://["},
    ],
)
def test_the_page_of_another_site_gets_nothing(server, headers):
    answer, body = asked(server, **headers)
    assert (answer.status, "watched" in body) == (403, False)


@pytest.mark.parametrize(
    "path",
    [
        "/../secret",
        "/..%2fsecret",
        "/a/config.json",
        "//etc/passwd",
        "/state/../../secret",
        "/rounds?run=../secret&from=0",
        "/rounds?run=a&from=0",
        "/rounds?run=-1&from=0",
        "/rounds?run=1&from=-1",
        "/rounds?run=1&from=99999999999",
        "/rounds?run=%D9%A3&from=0",
        "/rounds?run=999&from=0",
        "/rounds",
        "/favicon.ico",
        "http://[x/state",
    ],
)
def test_there_are_no_other_addresses(server, path):
    answer, body = asked(server, path)
    assert answer.status in (400, 404)
    assert "not yours" not in body


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD"])
def test_nothing_but_reading_is_possible(server, method):
    assert asked(server, method=method)[0].status == 501


def test_no_other_site_may_embed_or_read_it(server):
    answer, _ = asked(server, "/")
    assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"]
    assert answer.headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert "Access-Control-Allow-Origin" not in answer.headers


def test_a_file_and_a_port_that_is_taken_are_refused(server, tmp_path):
    with pytest.raises(InputError, match="is a file: give a run's directory"):
        Server(tmp_path / "secret")
    with pytest.raises(InputError, match=rf"--port {server.server_port} cannot be used: .* Leave it out"):
        Server(tmp_path, server.server_port)
    with pytest.raises(InputError, match=r"--port 99999 cannot be used: give one from 1 to 65535, or [^.]*\.$"):
        Server(tmp_path, 99999)


@pytest.mark.slow
def test_the_command_serves_until_an_interrupt(tmp_path: Path):
    import signal
    import time
    import urllib.request

    with Started("watch", tmp_path / "later") as started:
        said, end = "", time.monotonic() + 60
        while "at http://" not in said and time.monotonic() < end:
            time.sleep(0.05)
            said = started._files[0].read_text()
        address = said.split(" at ")[1].split()[0]
        with urllib.request.urlopen(f"{address}state", timeout=30) as answer:
            assert json.load(answer)["runs"] == []
        started.send_signal(signal.SIGINT)
        ended = started.done()
    assert ended.returncode == 0
    assert "There is no" in ended.stdout


def test_browsers_leave_out_the_usual_port(server, monkeypatch):
    assert "127.0.0.1" not in server.own_hosts
    monkeypatch.setattr(server, "server_port", 80)
    assert {"127.0.0.1", "localhost", "127.0.0.1:80"} <= server.own_hosts


def test_a_run_whose_score_is_damaged_does_not_hide_the_others(tmp_path):
    for name in ("good", "bad"):
        run_of(tmp_path / name)
    file = tmp_path / "bad" / "config.json"
    written = json.loads(file.read_text())
    file.write_text(json.dumps({**written, "score": {"name": "test_accuracy", "percent": float("nan")}}))
    with served(tmp_path) as server:
        answer, body = asked(server)
    assert answer.status == 200
    states = {run["name"]: run["reason"] for run in json.loads(body)["runs"]}
    assert states["bad"] == "config.json is damaged"


def test_an_address_with_half_a_bracket_is_no_error_of_the_server(server, capsys):
    assert asked(server, "http://[x/state")[0].status == 400
    assert asked(server, Origin="http://[")[0].status == 403
    assert capsys.readouterr().err == ""
