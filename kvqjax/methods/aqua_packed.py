"""AQUA-KV's bodies as a kernel takes them."""

from kvqjax.codecs.kernel_form import Packed
from kvqjax.pallas_kernels.higgs import HiggsSpec
from kvqjax.pallas_kernels.predicted import Maps, PredictedBody, PredictedSpec

__all__ = ["predicted_form"]


def predicted_form(form: Packed | None, mapped: bool) -> Packed | None:
    """Name the kernel for codes that `form` reads, of what linear predictors miss, or, unless `mapped`, of keys and
    values themselves; None for codes other than HIGGS."""
    if form is None or not isinstance(form.spec, HiggsSpec):
        return None

    def body(weights, constants, stored, positions):
        codes = form.body(weights, constants, stored, positions)
        if not mapped:
            return PredictedBody(codes, None)
        return PredictedBody(codes, Maps(*(constants[s][name] for s in ("k", "v") for name in ("weight", "bias"))))

    return Packed(PredictedSpec(codes=form.spec, mapped=mapped), body)
