"""verl.tools.sandbox_fusion_tools"""

from lockstep.agents.tools.sandbox_fusion import SandboxFusionTool as SandboxFusionTool
