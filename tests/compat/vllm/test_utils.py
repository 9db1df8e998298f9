"""Helpers that scripts import from vLLM's modules."""

import argparse
import asyncio
import logging

import pytest

from octavo.compat.vllm import utils
from octavo.models.hub import resolve_model
from octavo.text.tokenizer import Tokenizer


def test_a_message_is_logged_once(caplog):
    logger = utils.init_logger("some.script")
    with caplog.at_level(logging.INFO, "some.script"):
        for _ in range(2):
            logger.info_once("hello %s", "you")
            logger.warning_once("hello %s", "you")
    assert [record.getMessage() for record in caplog.records] == ["hello you"] * 2


def test_ports_and_addresses():
    assert utils.join_host_port("::1", utils.get_open_port()).startswith("[::1]:")
    assert utils.get_ip().count(".") == 3 or ":" in utils.get_ip()
    parser = utils.FlexibleArgumentParser()
    parser.add_argument("--port", type=parser.check_port)
    assert parser.parse_args(["--port", "8000"]).port == 8000
    with pytest.raises(argparse.ArgumentTypeError, match="'80' is not a port"):
        parser.check_port("80")


def test_requests_of_a_data_set():
    parser = utils.FlexibleArgumentParser()
    utils.add_dataset_parser(parser)
    args = parser.parse_args(["--num_prompts", "3", "--random-input-len", "5"])
    samples = utils.get_samples(args, Tokenizer.from_folder(resolve_model("octavo/stories")))
    assert [(s.prompt_len, s.expected_output_len) for s in samples] == [(5, 128)] * 3
    assert all(isinstance(s.prompt, str) and s.multi_modal_data is None for s in samples)


class FakeRequest:
    def __init__(self, gone):
        self.gone = gone

    async def receive(self):
        while not self.gone:
            await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}


@pytest.mark.parametrize("gone", [False, True])
def test_a_handler_ends_when_its_client_goes_away(gone):
    @utils.with_cancellation
    async def handler(body, raw_request):
        await asyncio.sleep(0.05 if not gone else 60)
        return body

    assert asyncio.run(handler(5, raw_request=FakeRequest(gone))) == (None if gone else 5)
