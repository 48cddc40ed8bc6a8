"Fixtures that several test files share."
from unittest import mock

import numpy as np
import pytest
from PIL import Image

from foco.backbones import load_backbone


@pytest.fixture(scope="module", autouse=True)
def on_cpu():
    "Tests mean the CPU, also on a computer with a GPU."
    with mock.patch("torch.cuda.is_available", return_value=False): yield


@pytest.fixture(scope="module")
def tiny(on_cpu): return load_backbone()


@pytest.fixture(scope="module")
def pictures():
    noise = np.random.default_rng(0).integers(0, 256, (13, 90, 70, 3), dtype=np.uint8)
    return [Image.fromarray(picture) for picture in noise]
