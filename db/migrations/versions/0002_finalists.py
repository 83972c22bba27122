"""In `answer_v1`, single measurements of a search no longer supersede finalists measured after them."""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_VIEW = """
CREATE VIEW answer_v1 AS
SELECT device, device_kind, architecture, product, sm_count, workload, variant, revision, config,
       config_values, stale, measurement_id, kind, cache, verification, time_us, ci_low_us, ci_high_us,
       bound_us, recorded_at
FROM (
    SELECT speaking.*,
           ROW_NUMBER() OVER (
               PARTITION BY workload, device_id, variant, stale, kind, cache
               ORDER BY CASE verification WHEN 'not verified' THEN 1 ELSE 0 END, time_us, measurement_id
           ) AS place
    FROM (
        SELECT d.key AS device, d.kind AS device_kind, d.architecture, d.product, d.sm_count, t.workload,
               t.device_id, t.variant, t.revision, t.config, t.config_values, t.stale,
               m.id AS measurement_id, m.kind, m.purpose, m.cache, m.verification,
               COALESCE(m.median_us, m.predicted_us) AS time_us, m.ci_low_us, m.ci_high_us, m.bound_us,
               m.recorded_at,
               MAX(CASE m.purpose WHEN 'finalist' THEN m.id ELSE 0 END) OVER (
                   PARTITION BY t.workload, t.device_id, t.stale, m.kind, m.cache
               ) AS last_final
        FROM measurement AS m
        JOIN trial AS t ON t.id = m.trial_id
        JOIN device AS d ON d.id = t.device_id
        WHERE (m.kind = 'predicted' OR (m.kind = 'measured' AND m.verification <> 'not verified'))
          AND NOT EXISTS (
              SELECT 1 FROM measurement AS other
              WHERE other.trial_id = m.trial_id
                AND (other.kind = 'wrong_result'
                     OR (other.id > m.id
                         AND (other.kind IN ('compile_failed', 'launch_failed', 'timed_out', 'crashed')
                              OR (other.kind = m.kind
                                  AND COALESCE(other.cache, '') = COALESCE(m.cache, '')))))
          )
    ) AS speaking
    WHERE purpose = 'finalist' OR measurement_id > last_final
) AS placed
WHERE place = 1
"""

_VIEW_BEFORE = """
CREATE VIEW answer_v1 AS
SELECT device, device_kind, architecture, product, sm_count, workload, variant, revision, config,
       config_values, stale, measurement_id, kind, cache, verification, time_us, ci_low_us, ci_high_us,
       bound_us, recorded_at
FROM (
    SELECT d.key AS device, d.kind AS device_kind, d.architecture, d.product, d.sm_count, t.workload,
           t.variant, t.revision, t.config, t.config_values, t.stale, m.id AS measurement_id, m.kind,
           m.cache, m.verification, COALESCE(m.median_us, m.predicted_us) AS time_us, m.ci_low_us,
           m.ci_high_us, m.bound_us, m.recorded_at,
           ROW_NUMBER() OVER (
               PARTITION BY t.workload, t.device_id, t.variant, t.stale, m.kind, m.cache
               ORDER BY CASE m.verification WHEN 'not verified' THEN 1 ELSE 0 END,
                        COALESCE(m.median_us, m.predicted_us), m.id
           ) AS place
    FROM measurement AS m
    JOIN trial AS t ON t.id = m.trial_id
    JOIN device AS d ON d.id = t.device_id
    WHERE (m.kind = 'predicted' OR (m.kind = 'measured' AND m.verification <> 'not verified'))
      AND NOT EXISTS (
          SELECT 1 FROM measurement AS other
          WHERE other.trial_id = m.trial_id
            AND (other.kind = 'wrong_result'
                 OR (other.id > m.id
                     AND (other.kind IN ('compile_failed', 'launch_failed', 'timed_out', 'crashed')
                          OR (other.kind = m.kind AND COALESCE(other.cache, '') = COALESCE(m.cache, '')))))
      )
) AS speaking
WHERE place = 1
"""


def upgrade() -> None:
    """Upgrade to revision 0002."""
    op.execute("DROP VIEW answer_v1")
    op.execute(_VIEW)


def downgrade() -> None:
    """Downgrade to revision 0001."""
    op.execute("DROP VIEW answer_v1")
    op.execute(_VIEW_BEFORE)
