"""The decoder's Triton kernels, compiled, against plain torch on a GPU."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU, and torch sees none here", allow_module_level=True)

from tests.verifier.gpu.delta_kernel_checks import *  # noqa: F403
from tests.verifier.gpu.kernel_checks import *  # noqa: F403
