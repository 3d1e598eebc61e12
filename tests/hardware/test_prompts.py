"""The least that a prompt needs, and estimates of its time."""

import dataclasses

from tiny import tiny

from kvqjax.hardware.devices import DEVICES
from kvqjax.hardware.prompts import REACHED, estimated_seconds, prompt_operations
from kvqjax.model.loading import config_of


def test_the_least_that_a_prompt_needs():
    """Weights of two layers for each token, the head for one, scores and sums over what each token
    sees."""
    config, least = tiny().config, prompt_operations
    # q, k and v, o, the MLP, two norms.
    layer = 32 * 64 + 2 * 32 * 32 + 64 * 32 + 3 * 32 * 64 + 2 * 32
    assert least(config, 0, 1) == 2 * (2 * layer + 50 * 32) + 2 * 4 * 64 * 1
    assert least(config, 0, 3) - least(config, 0, 2) == 2 * 2 * layer + 2 * 4 * 64 * 3
    assert least(config, 10, 1) - least(config, 0, 1) == 2 * 4 * 64 * 10
    slides = dataclasses.replace(config, sliding_window=4)
    assert least(slides, 10, 1) - least(slides, 0, 1) == 2 * 4 * 64 * 3
    chunked = dataclasses.replace(slides, chunked=True)  # token 10 is the third of its chunk
    assert least(chunked, 10, 1) - least(chunked, 0, 1) == 2 * 4 * 64 * 2
    assert least(chunked, 0, 8) == 8 * least(chunked, 0, 1) - 7 * 2 * 50 * 32 + 2 * 4 * 64 * 12


def test_prompts_are_estimated_for_chips_whose_programs_were_compiled():
    config = config_of("llama-3.1-8b")
    for chip in REACHED:
        least = prompt_operations(config, 0, 32768) / (DEVICES[chip].tflops * 1e12)
        assert least < estimated_seconds(config, 32768, 1, chip) < 5 * least
    assert estimated_seconds(config, 32768, 1, "t4") is None
