"""Parameters with roles, and banks that stack those of all layers."""

from deepstack.parameters.banks import Bank as Bank
from deepstack.parameters.banks import Banks as Banks
from deepstack.parameters.banks import global_norm as global_norm
from deepstack.parameters.banks import layer_norms as layer_norms
from deepstack.parameters.role import RoleParameter as RoleParameter
from deepstack.parameters.role import has_role as has_role
from deepstack.parameters.role import parameter as parameter
