"""A host pool for sglang-jax's HiCache. Nothing here imports sglang-jax before `install` is called."""

from kvjax.serving.sglang_jax.device_groups import DeviceGroup as DeviceGroup
from kvjax.serving.sglang_jax.device_groups import groups_of as groups_of
from kvjax.serving.sglang_jax.host_pool import HostPool as HostPool
from kvjax.serving.sglang_jax.installation import install as install
from kvjax.serving.sglang_jax.installation import uninstall as uninstall
from kvjax.serving.sglang_jax.mixed import GroupPool as GroupPool
from kvjax.serving.sglang_jax.mixed import MixedHostPool as MixedHostPool
