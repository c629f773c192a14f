"""Levels of storage below the host pool: what comes back is what was stored, or it is a miss."""

from kvjax.tiers.tier import Tier as Tier
from kvjax.tiers.tier import TierError as TierError
from kvjax.tiers.tier import TierFull as TierFull
from kvjax.tiers.tier import TierTimeout as TierTimeout
from kvjax.tiers.tier import TierUnavailable as TierUnavailable
from kvjax.tiers.tier import Usage as Usage
