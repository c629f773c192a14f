"""Where single layers, or all layers of a kind, have fields of their own, or another layer's cache."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvjax._checks import is_int
from kvjax.models.families import Family
from kvjax.models.fields import Fields
from kvjax.models.layers import Mixer


class LayerFields:
    """Where single layers, or all layers of a kind, have fields of their own."""

    def __init__(self, fields: Fields, num_layers: int, family: Family):
        self._fields = fields
        self._num_layers = num_layers
        self._family = family
        fields.reads("kv_source_layer_ids", "attention_chunk_size")
        if fields.get("ple_layer_ids"):
            fields.refuse("ple_layer_ids", "must be empty, as kvjax does not understand states of n-grams")
        self._of_layer = self._overrides()
        self._sources = fields.listed("kv_source_layers")
        self._num_shared = fields.integer("num_kv_shared_layers", at_least=0, default=0)
        if self._num_shared >= num_layers:
            fields.refuse("num_kv_shared_layers", f"must be below the number of layers, {num_layers}")
        self._share = fields.integer("cla_share_factor", default=1) if fields.get("use_cla") else 1
        fields.reads("cla_share_factor")

    def with_readers(self, layers: list[Mixer]) -> list[Mixer]:
        """Marks the layers that read the keys and values of another one and own none."""
        return [replace(one, reads_another=self._reads(n, layers)) for n, one in enumerate(layers)]

    def _reads(self, layer: int, layers: list[Mixer]) -> bool:
        own = self._num_layers - self._num_shared
        if layers[layer].attention is None:
            return False
        if layer >= own:
            if not any(layers[n].attention == layers[layer].attention for n in range(own)):
                self._fields.refuse(
                    "num_kv_shared_layers", f"must leave a layer of each kind, and leaves none for layer {layer}"
                )
            return True
        if self._sources is not None and layer < len(self._sources):
            source = self._sources[layer]
            if type(source) is not int or not 0 <= source <= layer:
                self._fields.refuse("kv_source_layers", "must name a layer at or below each", source)
            return source != layer
        return layer % self._share != 0

    def of_layer(self, layer: int, mixer: Mixer) -> Fields:
        """The fields of one layer."""
        return self._fields.with_layer({**self._of_kind(mixer), **self._of_layer.get(layer, {})})

    def _overrides(self) -> dict[int, dict[str, Any]]:
        fields, found = self._fields, {n: {} for n in range(self._num_layers)}
        table = fields.get("per_layer_config")
        if table is not None:
            if not isinstance(table, Mapping):
                fields.refuse("per_layer_config", "must be an object of objects by layer")
            for key, values in table.items():
                layer = int(key) if isinstance(key, int) or (isinstance(key, str) and key.isdecimal()) else -1
                if layer not in found or not isinstance(values, Mapping):
                    fields.refuse("per_layer_config", f"must be an object of objects by layer below {len(found)}", key)
                found[layer].update(values)
        for field in ("num_key_value_heads", "sliding_window", "num_attention_heads", "head_dim"):
            values = fields.get(field)
            if isinstance(values, (list, tuple)):
                if not values or self._num_layers % len(values):
                    fields.refuse(field, f"must have an entry for each of {self._num_layers} layers")
                for n, values_of_layer in found.items():
                    values_of_layer.update(_renamed(fields, field, values[n % len(values)]))
        per_layer = fields.listed("num_key_value_heads_per_layer")
        if per_layer is not None:
            if len(per_layer) != self._num_layers:
                fields.refuse("num_key_value_heads_per_layer", f"must have an entry for each of {len(found)} layers")
            for n, heads in enumerate(per_layer):
                found[n]["num_key_value_heads"] = heads
        for n, block in enumerate(fields.listed("block_configs") or ()):
            attention = block.get("attention") if isinstance(block, Mapping) else None
            if not isinstance(attention, Mapping):
                fields.refuse("block_configs", "must hold objects with `attention`", block)
            per_head = attention.get("n_heads_in_group")
            if per_head is not None and n in found:
                found[n]["num_key_value_heads"] = self._heads_of_groups(per_head)
        return found

    def _heads_of_groups(self, per_head: Any) -> int:
        heads = self._fields.integer("num_attention_heads")
        if not is_int(per_head) or per_head < 1 or heads % per_head:
            rule = f"must have an `n_heads_in_group` that divides `num_attention_heads`, {heads}"
            self._fields.refuse("block_configs", rule, per_head)
        return heads // per_head

    def _of_kind(self, mixer: Mixer) -> dict[str, Any]:
        """Fields that only sliding, or only full, layers take."""
        fields, found = self._fields, {}
        if mixer.attention == "sliding":
            for field in ("num_key_value_heads", "head_dim", "v_head_dim", "kv_lora_rank", "qk_rope_head_dim"):
                value = fields.get(f"swa_{field}")
                if value is not None:
                    found.update(_renamed(fields, field, value))
            if self._family.swa_kv_factor > 1 and fields.get("swa_num_key_value_heads") is None:
                heads = fields.integer("num_key_value_heads") * self._family.swa_kv_factor
                found.update(_renamed(fields, "num_key_value_heads", heads))
            other = fields.table("attention_other_setting")
            if other is not None:
                other.reads("attention_type")
                for field in ("num_attention_groups", "num_key_value_heads", "head_dim"):
                    if other.states(field):
                        found.update(
                            _renamed(
                                fields,
                                "head_dim" if field == "head_dim" else "num_key_value_heads",
                                other.integer(field),
                            )
                        )
        elif mixer.attention == "full":
            found.update(_renamed(fields, "head_dim", fields.get("global_head_dim")))
            if fields.get("attention_k_eq_v") and fields.get("num_global_key_value_heads") is not None:
                found.update(_renamed(fields, "num_key_value_heads", fields.get("num_global_key_value_heads")))
        return found


def _renamed(fields: Fields, field: str, value: Any) -> dict[str, Any]:
    """A value under the name that the config uses for the field."""
    return {} if value is None else {fields.name_of(field).rpartition(".")[2]: value}
