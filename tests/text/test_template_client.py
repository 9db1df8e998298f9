"""Process that renders templates: its limits, its end, and attacks of a hostile template."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from octavo.errors import ModelError, OctavoError, RequestError
from octavo.text import template_client
from octavo.text.template_client import RenderRequest, TemplateClient

USER = [{"role": "user", "content": "hi"}]
PLAIN = "{{ messages[0].content }}!"
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def render(client, source, messages=USER):
    return client.submit(RenderRequest({"default": source}, {}, messages)).result()


@pytest.fixture(scope="module")
def client():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(template_client, "MAX_RENDER_SECONDS", 0.3)
        made = TemplateClient()
        assert render(made, PLAIN) == "hi!"
        yield made
        made.close()


@pytest.fixture(scope="module")
def patient():
    """Return a client whose renders of many characters also end on the slowest machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(template_client, "MAX_RENDER_SECONDS", 30)
        made = TemplateClient()
        assert render(made, PLAIN) == "hi!"  # its process has read the limit
    yield made
    made.close()


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 10000000000 }}",
        "{{ 10000000000 * [1] }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ '%1000000000s' % 'a' }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '{:>1000000000}'.format(1) }}",
        "{{ 'a' | center(3 * 10 ** 9) }}",
        "{{ 'a'.rjust(3 * 10 ** 9) }}",
        "{{ 'a\\nb' | indent(10 ** 9) }}",
        "{{ ['ab' * 1000] * 1000 | sum(start=[]) }}",
        "{{ ([[1] * 1000] * 100000) | sum(start=[]) }}",
        "{{ lipsum(n=10 ** 7) }}",
        "{{ range(99999) | map('string') | list * 9999 }}",
        "{{ ('a' * 100000) | replace('', 'x' * 100000) }}",
        "{{ ('ab' * 10 ** 6) | urlize | wordwrap(1) | length }}{{ 'x' * 10 ** 8 }}",
        "{{ strftime_now('%c' * 10 ** 8) }}",
        "{{ messages | tojson(indent=10 ** 9) }}{{ 'x' * 10 ** 8 }}",
        ENDLESS,
        "{% for i in range(99999) %}{% for j in range(99999) %}{{ i }}{% endfor %}{% endfor %}",
        "{% set n = namespace(x='xxxxxxxx') %}{% for i in range(99) %}"
        "{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ " + "-" * 50_000 + "1 }}",
    ],
)
def test_hostile_templates_are_stopped(client, source):
    with pytest.raises((ModelError, RequestError)) as caught:
        render(client, source)
    assert len(str(caught.value)) < 10_000
    assert render(client, PLAIN) == "hi!"
    assert psutil.Process(client._process.pid).memory_info().rss < 600 * 2**20


def test_a_long_text_is_no_attack(patient):
    text = "word " * 400_000
    assert render(patient, PLAIN, [{"role": "user", "content": text}]) == text + "!"


def test_the_limits_are_named(client, patient):
    with pytest.raises(RequestError, match=r"more than 0\.3 s of processor"):
        render(client, ENDLESS)
    with pytest.raises(RequestError, match="more than 512 MiB"):
        render(client, "{{ '%1000000000s' % 'a' }}")
    with pytest.raises(RequestError, match="16777216 characters"):
        render(patient, "{{ 'x' * 20000000 }}")


def test_renders_behind_a_guilty_one_are_done(client):
    bad = [client.submit(RenderRequest({"default": ENDLESS}, {}, USER)) for _ in range(2)]
    good = [client.submit(RenderRequest({"default": PLAIN}, {}, USER)) for _ in range(5)]
    assert [future.result() for future in good] == ["hi!"] * 5
    assert all(isinstance(future.exception(), RequestError) for future in bad)


def test_a_killed_process_is_started_again(client):
    render(client, PLAIN)
    os.kill(client._process.pid, signal.SIGKILL)
    assert render(client, PLAIN) == "hi!"


def test_a_process_killed_in_the_middle_of_a_render(monkeypatch):
    """The render is tried once more, then it fails; the next one works."""
    monkeypatch.setattr(template_client, "MAX_RENDER_SECONDS", 30.0)
    client = TemplateClient()
    render(client, PLAIN)
    seen = set()
    with ThreadPoolExecutor(1) as pool:
        failing = pool.submit(render, client, ENDLESS)
        while not failing.done():
            pid = client._process.pid
            if pid is not None and pid not in seen and busy(pid):
                seen.add(pid)
                os.kill(pid, signal.SIGKILL)
        with pytest.raises(ModelError, match="-9"):
            failing.result()
    assert len(seen) == 2
    assert render(client, PLAIN) == "hi!"
    client.close()


def busy(pid):
    """Return whether the process renders: it has started and used some time since."""
    try:
        return sum(psutil.Process(pid).cpu_times()[:2]) > 0.4
    except psutil.NoSuchProcess:
        return False


def test_a_process_that_does_not_answer_is_given_up(monkeypatch):
    client = TemplateClient()
    try:
        render(client, PLAIN)
        monkeypatch.setattr(template_client, "_MAX_WAIT_SECONDS", 0.5)
        process = psutil.Process(client._process.pid)
        process.suspend()
        with pytest.raises(ModelError, match=r"no answer arrived within 0\.5 s"):
            render(client, PLAIN)
        assert not process.is_running()
    finally:
        client.close()


def test_no_zombie_is_left(client):
    render(client, PLAIN)
    process = psutil.Process(client._process.pid)
    process.kill()
    end = time.monotonic() + 60
    while process.is_running():  # a zombie runs for psutil
        assert time.monotonic() < end
        time.sleep(0.01)


def test_it_survives_ctrl_c_and_ends_with_its_parent():
    code = (
        "import os, signal, sys, time\n"
        "from octavo.text.template_client import RenderRequest, TemplateClient\n"
        "client = TemplateClient()\n"
        "request = RenderRequest({'default': 'x'}, {}, [{'role': 'user', 'content': ''}])\n"
        "client.submit(request).result()\n"
        "pid = client._process.pid\n"
        "os.kill(pid, signal.SIGINT); os.kill(pid, signal.SIGTERM)\n"
        "client.submit(request).result()\n"
        "assert client._process.pid == pid\n"
        "print(pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    process = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    with contextlib.suppress(psutil.NoSuchProcess):
        assert process.wait(60) in (0, None)


def test_ctrl_c_does_not_reach_it_while_it_starts():
    code = (
        "import os, signal, time\n"
        "from octavo.text.template_client import RenderRequest, TemplateClient\n"
        "signal.signal(signal.SIGINT, lambda *_: None)\n"
        "client = TemplateClient()\n"
        "request = RenderRequest({'default': 'x'}, {}, [{'role': 'user', 'content': ''}])\n"
        "future = client.submit(request)\n"
        "while client._process.pid is None:\n"
        "    time.sleep(0.001)\n"
        "for _ in range(20):\n"
        "    os.killpg(0, signal.SIGINT)\n"
        "    time.sleep(0.005)\n"
        "print(future.result())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        start_new_session=True,
        timeout=200,
    )
    assert (done.stdout, done.stderr) == ("x\n", "")


def test_what_cannot_travel_is_the_requests_fault(client):
    for value in (object(), 2**80, "\ud800"):
        with pytest.raises(RequestError):
            render(client, PLAIN, [{"role": "user", "content": "x", "extra": value}])
    with pytest.raises(ModelError, match="not usable"):
        render(client, 5)


def test_errors_travel_with_their_class_and_field(client):
    with pytest.raises(OctavoError) as caught:
        render(client, "x", [{"role": "user", "content": [{"type": "image_url"}]}])
    assert (type(caught.value).__name__, caught.value.param) == ("UnsupportedError", "messages")


def test_two_threads_get_their_own_answers(client):
    """An executor has two threads after a Ctrl-C that interrupts its first `submit`."""
    requests = [RenderRequest({"default": f"{{{{ 'a' * {n} }}}}"}, {}, USER) for n in range(200)]
    with ThreadPoolExecutor(4) as threads:
        texts = list(threads.map(client._render, requests))
    assert texts == ["a" * n for n in range(200)]
