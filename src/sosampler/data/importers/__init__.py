"""Official files of public data sets become manifests."""

from sosampler.data.importers.build import READERS, Imported, check_out, import_dataset

__all__ = ["READERS", "Imported", "check_out", "import_dataset"]
