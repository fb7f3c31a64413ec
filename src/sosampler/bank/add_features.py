"""`add_features`: what a network makes of every stored frame of a bank is computed once and kept beside the frames."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from sosampler._util.progress import OnProgress
from sosampler._util.validation import one_of
from sosampler.bank.bank import Bank
from sosampler.bank.format import BankFolder, import_pyarrow
from sosampler.bank.outputs import check_features_name
from sosampler.bank.prepare import ask_about_stored

PRECISIONS = ("float16", "float32")


def add_features(
    bank: Bank | str | os.PathLike[str],
    network: Any,
    *,
    name: str | None = None,
    device: str | None = None,
    batch: int | None = None,
    precision: str = "float16",
    on_progress: OnProgress | None = None,
) -> Bank:
    """Keep the features of a network for every stored frame of a finished bank; `Bank.features` reads them.

    Of a classifier that is what stands before its class layer when it sees one frame as a clip of one; of a sampler
    the features of its backbone. Killed at any moment and called again with the same arguments it goes on, and ends
    with the same bytes; where all is there it does nothing.

    Args:
        bank: the bank, or its folder.
        network: a classifier or a `SOSampler` without a temporal shift; the folder of a saved one; or the name of a
            classifier.
        name: of these features in the bank; None takes the network's fingerprint.
        device: where the network runs; None leaves it where it is.
        batch: frames that go through the network at once.
        precision: in which features are kept, "float16" or "float32".
        on_progress: called after each video.
    """
    import_pyarrow()
    folder = BankFolder(bank.path if isinstance(bank, Bank) else Path(bank))
    Bank(folder.path)  # says what is wrong with it
    one_of("precision", precision, PRECISIONS)
    if name is not None:
        check_features_name(name)
    from sosampler.video.source import import_torch

    import_torch()
    from sosampler.bank.features import FeatureAsker, feature_network

    with feature_network(network, device) as source:
        asker = FeatureAsker(source, name=name, precision=precision, batch=batch)
        return ask_about_stored(folder, asker, on_progress)
