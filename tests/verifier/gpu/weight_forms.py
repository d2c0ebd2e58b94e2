"""Forms of weights in groups, and random weights of them."""

import torch

from verifier.gpu.groups import Element, GroupedWeight, Offset, WeightForm


def form(element: Element, group: int, scale: torch.dtype, offset: Offset) -> WeightForm:
    return WeightForm(element=element, group=group, scale=scale, offset=offset)


FORMS = {
    "int4": form(Element.UINT4, 32, torch.float16, Offset.ZERO),
    "int4_minima": form(Element.UINT4, 64, torch.bfloat16, Offset.MINIMUM),
    "int4_long": form(Element.UINT4, 128, torch.bfloat16, Offset.ZERO),
    "int4_float32": form(Element.UINT4, 32, torch.float32, Offset.MINIMUM),
    "int8": form(Element.INT8, 64, torch.float16, Offset.ZERO),
    "int8_channel": form(Element.INT8, 0, torch.float32, Offset.ZERO),
    "int8_short": form(Element.INT8, 16, torch.float32, Offset.NONE),
    "fp8_blocks": form(Element.E4M3, 128, torch.float32, Offset.NONE),
    "fp8_channel": form(Element.E4M3, 0, torch.float32, Offset.NONE),
    "mxfp4": form(Element.E2M1, 32, torch.uint8, Offset.NONE),
}


def grouped(name: str, *shape: int, device: torch.device, seed: int = 5) -> GroupedWeight:
    """Any codes of numbers; weights are up to 2. A group has the least exponent of MXFP4."""
    weight = GroupedWeight.empty(FORMS[name], shape, device=device)
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(256, weight.codes.shape, generator=generator)
    if weight.form.element is Element.E4M3:
        codes -= (codes & 127 == 127).int()
    weight.codes.copy_(codes)
    scales = torch.randint(1, 99, weight.groups.shape[:2], generator=generator)
    if weight.form.scale is torch.uint8:
        scales = 121 + scales % 5
        scales[0, 0] = seed % 3
    else:
        scales = (
            scales
            / {Element.UINT4: 800, Element.INT8: 6400, Element.E4M3: 22400}[weight.form.element]
        )
    weight.groups[..., 0] = scales.to(device)
    if weight.form.offset is Offset.ZERO:
        zeros = torch.randint(17, scales.shape, generator=generator)
        weight.groups[..., 1] = (zeros - 8 * (weight.form.element is Element.INT8)).to(device)
    elif weight.form.offset is Offset.MINIMUM:
        weight.groups[..., 1] = torch.rand(scales.shape, generator=generator).to(device) - 0.5
    return weight
