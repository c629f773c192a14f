"""Levels of storage below the host pool: what comes back is what was stored, or it is a miss."""

from kvjax.tiers.tier import Tier as Tier
from kvjax.tiers.tier import TierError as TierError
from kvjax.tiers.tier import TierFullError as TierFullError
from kvjax.tiers.tier import TierTimeoutError as TierTimeoutError
from kvjax.tiers.tier import TierUnavailableError as TierUnavailableError
from kvjax.tiers.tier import Usage as Usage
from kvjax.tiers.urls import open_tier as open_tier
