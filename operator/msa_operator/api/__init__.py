"""The custom resources' types, and the one way in which a job is read."""

from msa_operator.api.job import API_VERSION, GROUP, VERSION, JobSpec, LongContextJob
from msa_operator.api.load import load_job, load_profile, parse_job
from msa_operator.api.problems import JobError, Problem
from msa_operator.api.profile import HardwareProfile
from msa_operator.api.status import JobStatus

__all__ = [
    "API_VERSION", "GROUP", "VERSION", "HardwareProfile", "JobError", "JobSpec", "JobStatus",
    "LongContextJob", "Problem", "load_job", "load_profile", "parse_job",
]  # fmt: skip
