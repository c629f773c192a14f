"""Loads and stores in flight: how they end, late, cancelled or well."""

from kvjax.jobs.job import Job as Job
from kvjax.jobs.job import JobResult as JobResult
from kvjax.jobs.jobs import Jobs as Jobs
