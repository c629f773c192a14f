"""Several processes of one model, each with an offloader of its own, that must decide alike."""

from kvjax.ranks.channel import Channel as Channel
from kvjax.ranks.channel import RankLostError as RankLostError
from kvjax.ranks.channel import RanksDifferError as RanksDifferError
from kvjax.ranks.channel import RanksError as RanksError
from kvjax.ranks.coordination import CoordinationChannel as CoordinationChannel
from kvjax.ranks.offloader import RankedOffloader as RankedOffloader
