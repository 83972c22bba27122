"""Columns for the comparison with the default and for the fastest sample; `answer_v1` uses the comparison."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_VIEW = """
CREATE VIEW answer_v1 AS
SELECT device, device_kind, architecture, product, sm_count, workload, variant, revision, config,
       config_values, stale, measurement_id, kind, cache, verification, time_us, ci_low_us, ci_high_us,
       bound_us, recorded_at
FROM (
    SELECT compared.*,
           ROW_NUMBER() OVER (
               PARTITION BY workload, device_id, variant, stale, kind, cache
               ORDER BY CASE verification WHEN 'not verified' THEN 1 ELSE 0 END, time_us, measurement_id
           ) AS place
    FROM (
        SELECT speaking.*,
               MAX(CASE versus_default WHEN 'itself' THEN ci_low_us END) OVER (
                   PARTITION BY workload, device_id, variant, stale, kind, cache
               ) AS default_low_us
        FROM (
            SELECT d.key AS device, d.kind AS device_kind, d.architecture, d.product, d.sm_count, t.workload,
                   t.device_id, t.variant, t.revision, t.config, t.config_values, t.stale,
                   m.id AS measurement_id, m.kind, m.purpose, m.cache, m.verification,
                   COALESCE(m.median_us, m.predicted_us) AS time_us, m.ci_low_us, m.ci_high_us, m.bound_us,
                   m.recorded_at, m.versus_default,
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
    ) AS compared
    WHERE default_low_us IS NULL
       OR versus_default IN ('itself', 'faster')
       OR (versus_default IS NULL AND ci_high_us < default_low_us)
) AS placed
WHERE place = 1
"""

_VIEW_BEFORE = """
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

_FASTEST = {
    "sqlite": "SELECT MIN(value) FROM json_each(samples_us)",
    "postgresql": "SELECT MIN(value::double precision) FROM json_array_elements_text(samples_us) AS value",
}


def upgrade() -> None:
    """Upgrade to revision 0003."""
    op.execute("DROP VIEW answer_v1")
    with op.batch_alter_table("measurement") as table:
        table.add_column(sa.Column("fastest_us", sa.Double, nullable=True))
        table.add_column(sa.Column("versus_default", sa.String(10), nullable=True))
        table.add_column(sa.Column("comparison", sa.JSON, nullable=True))
        table.create_check_constraint(
            op.f("ck_measurement_versus_default"), "versus_default IN ('itself', 'faster', 'not faster')"
        )
    fastest = _FASTEST[op.get_bind().dialect.name]
    op.execute(f"UPDATE measurement SET fastest_us = ({fastest}) WHERE samples_us IS NOT NULL")  # noqa: S608 (a constant)
    op.execute(_VIEW)


def downgrade() -> None:
    """Downgrade to revision 0002."""
    op.execute("DROP VIEW answer_v1")
    with op.batch_alter_table("measurement") as table:
        table.drop_constraint(op.f("ck_measurement_versus_default"), type_="check")
        for name in ("fastest_us", "versus_default", "comparison"):
            table.drop_column(name)
    op.execute(_VIEW_BEFORE)
