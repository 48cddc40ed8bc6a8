"Where the official annotation files are: the folder FOCO_BENCHMARKS, or shared/benchmarks beside the repository. Tests skip what is absent."
import os
from pathlib import Path

OFFICIAL = Path(os.environ.get("FOCO_BENCHMARKS") or Path(__file__).resolve().parents[2]/"shared"/"benchmarks")
