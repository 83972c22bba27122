-- A database of schema 0008 as it was written then (sqlite3 .dump); never to be made anew.
BEGIN TRANSACTION;
CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL, CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num));
INSERT INTO "alembic_version" VALUES('0008');
CREATE TABLE demand (
	id INTEGER NOT NULL, 
	device_id INTEGER NOT NULL, 
	workload TEXT NOT NULL, 
	origin VARCHAR(32) NOT NULL, 
	calls INTEGER NOT NULL, 
	time_us DOUBLE NOT NULL, 
	first_noted_at DATETIME NOT NULL, 
	last_noted_at DATETIME NOT NULL, 
	CONSTRAINT pk_demand PRIMARY KEY (id), 
	CONSTRAINT uq_demand_key UNIQUE (device_id, workload, origin), 
	CONSTRAINT ck_demand_amount CHECK (calls > 0 AND time_us >= 0), 
	CONSTRAINT fk_demand_device_id FOREIGN KEY(device_id) REFERENCES device (id)
);
INSERT INTO "demand" VALUES(1,1,'gemm:m=64,n=64,k=64,dtype=f32','0123456789abcdef0123456789abcdef',10,200.25,'2026-11-20 12:01:00.000000','2026-11-20 12:02:00.000000');
INSERT INTO "demand" VALUES(2,1,'softmax:rows=64,cols=64,dtype=f32','0123456789abcdef0123456789abcdef',2,31.5,'2026-11-20 12:02:00.000000','2026-11-20 12:02:00.000000');
INSERT INTO "demand" VALUES(3,1,'gemm:m=64,n=64,k=64,dtype=f32','fedcba9876543210fedcba9876543210',30,612.25,'2026-11-20 12:01:30.000000','2026-11-20 12:03:00.000000');
CREATE TABLE device (
	id INTEGER NOT NULL, 
	"key" TEXT NOT NULL, 
	kind TEXT NOT NULL, 
	architecture TEXT NOT NULL, 
	product TEXT NOT NULL, 
	sm_count INTEGER NOT NULL, 
	power_limit_w DOUBLE, 
	descriptor JSON NOT NULL, 
	CONSTRAINT pk_device PRIMARY KEY (id), 
	CONSTRAINT uq_device_key UNIQUE ("key")
);
INSERT INTO "device" VALUES(1,'sm_90:h100-sxm,sm=132','gpu','sm_90','h100-sxm',132,NULL,'{"name":"h100-sxm","kind":"gpu","architecture":"sm_90","sm_count":132,"max_clock_mhz":1980,"dram_gb_s":3352,"l2_bytes":52428800,"fma_per_clock":128,"mma_flop_per_clock":{"tf32":2048,"f16":4096,"bf16":4096,"e4m3":8192,"int8":8192},"sfu_per_clock":16.0,"issue_per_clock":4.0,"smem_bytes_per_clock":128.0,"fill_bytes_per_clock":64.0,"smem_per_sm_bytes":233472,"smem_per_block_bytes":232448,"smem_reserved_bytes":1024,"threads_per_sm":2048,"blocks_per_sm":32,"registers_per_sm":65536,"partitions":4,"power_limit_w":null,"assumed":false}');
CREATE TABLE measurement (
	id INTEGER NOT NULL, 
	trial_id INTEGER NOT NULL, 
	run_id VARCHAR(32), 
	purpose VARCHAR(8) NOT NULL, 
	kind VARCHAR(16) NOT NULL, 
	median_us DOUBLE, 
	ci_low_us DOUBLE, 
	ci_high_us DOUBLE, 
	predicted_us DOUBLE, 
	cache VARCHAR(4), 
	verification VARCHAR(16), 
	reason TEXT, 
	bound_us DOUBLE, 
	samples_us JSON, 
	detail JSON NOT NULL, 
	resources JSON NOT NULL, 
	conditions JSON NOT NULL, 
	compile_s DOUBLE NOT NULL, 
	verify_s DOUBLE NOT NULL, 
	measure_s DOUBLE NOT NULL, 
	seed INTEGER, 
	recorded_at DATETIME NOT NULL, 
	fastest_us DOUBLE, 
	versus_default VARCHAR(10), 
	comparison JSON, 
	metrics JSON, 
	CONSTRAINT pk_measurement PRIMARY KEY (id), 
	CONSTRAINT ck_measurement_kind CHECK (kind IN ('measured', 'predicted', 'aborted', 'pruned', 'compile_failed', 'launch_failed', 'wrong_result', 'timed_out', 'crashed')), 
	CONSTRAINT ck_measurement_purpose CHECK (purpose IN ('search', 'finalist', 'audit')), 
	CONSTRAINT ck_measurement_time CHECK ((kind = 'measured') = (median_us IS NOT NULL) AND (kind = 'measured') = (ci_low_us IS NOT NULL) AND (kind = 'measured') = (ci_high_us IS NOT NULL) AND (kind = 'measured') = (cache IS NOT NULL) AND (kind IN ('measured', 'aborted')) = (samples_us IS NOT NULL) AND (kind = 'predicted') = (predicted_us IS NOT NULL) AND (kind IN ('measured', 'predicted')) = (verification IS NOT NULL)), 
	CONSTRAINT ck_measurement_reason CHECK ((kind IN ('compile_failed', 'launch_failed', 'wrong_result', 'timed_out', 'crashed')) = (reason IS NOT NULL)), 
	CONSTRAINT ck_measurement_cache CHECK (cache IN ('cold', 'warm')), 
	CONSTRAINT ck_measurement_versus_default CHECK (versus_default IN ('itself', 'faster', 'not faster')), 
	CONSTRAINT fk_measurement_trial_id FOREIGN KEY(trial_id) REFERENCES trial (id), 
	CONSTRAINT fk_measurement_run_id FOREIGN KEY(run_id) REFERENCES run (id)
);
INSERT INTO "measurement" VALUES(1,1,'00000000000000000000000000000001','search','measured',12.5,12.375,12.625,NULL,'cold','reference',NULL,2.5,'[12.5,12.625,12.375]','{"conditions":{"sm_clock_mhz":1980},"verification":{"detail":"all elements","worst":0.25}}','{"registers":168,"spill_bytes":0}','{"driver":"580.1","host":"node7"}',0.25,0.5,0.125,0,'2026-11-20 12:00:03.000000',12.375,NULL,NULL,'{"power_w": 287.5, "energy_j": 0.0021}');
INSERT INTO "measurement" VALUES(2,2,'00000000000000000000000000000001','search','predicted',NULL,NULL,NULL,3.0,NULL,'not verified',NULL,2.5,NULL,'{"verification":{"detail":"g++ is not installed","worst":null}}','{"registers":168,"spill_bytes":0}','{"driver":"580.1","host":"node7"}',0.25,0.5,0.125,1,'2026-11-20 12:00:04.500000',NULL,NULL,NULL,NULL);
INSERT INTO "measurement" VALUES(3,3,'00000000000000000000000000000001','search','aborted',NULL,NULL,NULL,NULL,NULL,NULL,NULL,2.5,'[99.0,98.5]','{"above_us":20.0}','{"registers":168,"spill_bytes":0}','{"driver":"580.1","host":"node7"}',0.25,0.5,0.125,2,'2026-11-20 12:00:06.000000',98.5,NULL,NULL,NULL);
INSERT INTO "measurement" VALUES(4,4,'00000000000000000000000000000001','search','pruned',NULL,NULL,NULL,NULL,NULL,NULL,NULL,2.5,NULL,'{"bound_us":8.0,"incumbent_us":7.0}','{"registers":168,"spill_bytes":0}','{"driver":"580.1","host":"node7"}',0.25,0.5,0.125,3,'2026-11-20 12:00:07.500000',NULL,NULL,NULL,NULL);
INSERT INTO "measurement" VALUES(5,5,'00000000000000000000000000000001','search','compile_failed',NULL,NULL,NULL,NULL,NULL,NULL,'error: expected '';''',2.5,NULL,'{}','{"registers":168,"spill_bytes":0}','{"driver":"580.1","host":"node7"}',0.25,0.5,0.125,4,'2026-11-20 12:00:09.000000',NULL,NULL,NULL,NULL);
INSERT INTO "measurement" VALUES(6,6,'00000000000000000000000000000001','search','launch_failed',NULL,NULL,NULL,NULL,NULL,NULL,'too many resources',2.5,NULL,'{}','{"registers":168,"spill_bytes":0}','{"driver":"580.1","host":"node7"}',0.25,0.5,0.125,5,'2026-11-20 12:00:10.500000',NULL,NULL,NULL,NULL);
INSERT INTO "measurement" VALUES(7,7,'00000000000000000000000000000001','search','wrong_result',NULL,NULL,NULL,NULL,NULL,NULL,'y[0, 3] is 7, not 0.1',2.5,NULL,'{}','{"registers":168,"spill_bytes":0}','{"driver":"580.1","host":"node7"}',0.25,0.5,0.125,6,'2026-11-20 12:00:12.000000',NULL,NULL,NULL,NULL);
INSERT INTO "measurement" VALUES(8,8,'00000000000000000000000000000001','search','timed_out',NULL,NULL,NULL,NULL,NULL,NULL,'no answer within 10 s',2.5,NULL,'{}','{"registers":168,"spill_bytes":0}','{"driver":"580.1","host":"node7"}',0.25,0.5,0.125,7,'2026-11-20 12:00:13.500000',NULL,NULL,NULL,NULL);
INSERT INTO "measurement" VALUES(9,9,'00000000000000000000000000000001','search','crashed',NULL,NULL,NULL,NULL,NULL,NULL,'signal 11',2.5,NULL,'{}','{"registers":168,"spill_bytes":0}','{"driver":"580.1","host":"node7"}',0.25,0.5,0.125,8,'2026-11-20 12:00:15.000000',NULL,NULL,NULL,NULL);
INSERT INTO "measurement" VALUES(10,1,'00000000000000000000000000000001','finalist','measured',13.0,12.87,13.13,NULL,'cold','reference',NULL,NULL,'[13.0,13.13,12.87]','{"conditions":{"sm_clock_mhz":1980},"verification":{"detail":"all elements","worst":0.25}}','{}','{}',0.0,0.0,0.0,NULL,'2026-11-20 12:00:16.500000',12.87,'faster','{"default":{"ratio":1.25,"low":1.2,"high":1.3,"probability":1.0}}',NULL);
INSERT INTO "measurement" VALUES(11,10,NULL,'search','measured',11.0,10.89,11.11,NULL,'cold','reference',NULL,NULL,'[11.0,11.11,10.89]','{"conditions":{"sm_clock_mhz":1980},"verification":{"detail":"all elements","worst":0.25}}','{}','{}',0.0,0.0,0.0,NULL,'2026-11-20 12:00:18.000000',10.89,NULL,NULL,NULL);
INSERT INTO "measurement" VALUES(12,11,NULL,'search','measured',12.0,1.18799999999999990048e+01,1.21200000000000009949e+01,NULL,'warm','reference',NULL,NULL,'[12.0,12.120000000000001,11.879999999999999]','{"conditions":{"sm_clock_mhz":1980},"verification":{"detail":"all elements","worst":0.25}}','{}','{}',0.0,0.0,0.0,NULL,'2026-11-20 12:00:19.500000',1.18799999999999990048e+01,NULL,NULL,NULL);
CREATE TABLE origin (
	id VARCHAR(32) NOT NULL, 
	CONSTRAINT pk_origin PRIMARY KEY (id)
);
INSERT INTO "origin" VALUES('0123456789abcdef0123456789abcdef');
CREATE TABLE run (
	id VARCHAR(32) NOT NULL, 
	device_id INTEGER NOT NULL, 
	workload TEXT NOT NULL, 
	sampler TEXT NOT NULL, 
	seed INTEGER NOT NULL, 
	host TEXT NOT NULL, 
	versions JSON NOT NULL, 
	started_at DATETIME NOT NULL, 
	finished_at DATETIME, 
	masked INTEGER NOT NULL, 
	cached INTEGER NOT NULL, 
	wall_s DOUBLE NOT NULL, 
	compile_s DOUBLE NOT NULL, 
	verify_s DOUBLE NOT NULL, 
	measure_s DOUBLE NOT NULL, 
	overhead_s DOUBLE NOT NULL, 
	budget_trials INTEGER, 
	options JSON, 
	CONSTRAINT pk_run PRIMARY KEY (id), 
	CONSTRAINT fk_run_device_id FOREIGN KEY(device_id) REFERENCES device (id)
);
INSERT INTO "run" VALUES('00000000000000000000000000000001',1,'softmax:rows=64,cols=64,dtype=f32','bound',7,'here','{}','2026-11-20 12:00:01.500000','2026-11-20 12:00:22.500000',900,4,5.0,2.0,0.0,0.0,0.1,50,'{"sampler":"bound","seed":7,"variants":[],"audit":0.02,"warm":false,"learned_pruner":false,"protocol":{"cache":"cold","warmups":1,"min_samples":10,"max_samples":100,"max_s":1.0,"relative_error":0.005,"abort_after":2,"abort_factor":1.5},"offline":false,"timeout_s":60.0,"variant_files":{},"trials":50,"minutes":null,"stop_at_gap":null,"finalists":3,"baselines":true,"workers":0,"cluster":null,"shared_budget":""}');
CREATE TABLE trial (
	id INTEGER NOT NULL, 
	device_id INTEGER NOT NULL, 
	workload TEXT NOT NULL, 
	variant TEXT NOT NULL, 
	revision TEXT NOT NULL, 
	config TEXT NOT NULL, 
	config_values JSON NOT NULL, 
	state VARCHAR(8) NOT NULL, 
	claim_owner TEXT, 
	claim_expires_at DATETIME, 
	stale BOOLEAN NOT NULL, 
	CONSTRAINT pk_trial PRIMARY KEY (id), 
	CONSTRAINT uq_trial_key UNIQUE (device_id, workload, variant, config, revision), 
	CONSTRAINT ck_trial_state CHECK (state IN ('claimed', 'done')), 
	CONSTRAINT ck_trial_claim CHECK ((state = 'claimed') = (claim_owner IS NOT NULL) AND (state = 'claimed') = (claim_expires_at IS NOT NULL)), 
	CONSTRAINT fk_trial_device_id FOREIGN KEY(device_id) REFERENCES device (id)
);
INSERT INTO "trial" VALUES(1,1,'softmax:rows=64,cols=64,dtype=f32','softmax/example','r1','tile=0,ratio=0.5,order=nk','{"tile":0,"ratio":0.5,"order":"nk"}','done',NULL,NULL,0);
INSERT INTO "trial" VALUES(2,1,'softmax:rows=64,cols=64,dtype=f32','softmax/example','r1','tile=1,ratio=0.5,order=nk','{"tile":1,"ratio":0.5,"order":"nk"}','done',NULL,NULL,0);
INSERT INTO "trial" VALUES(3,1,'softmax:rows=64,cols=64,dtype=f32','softmax/example','r1','tile=2,ratio=0.5,order=nk','{"tile":2,"ratio":0.5,"order":"nk"}','done',NULL,NULL,0);
INSERT INTO "trial" VALUES(4,1,'softmax:rows=64,cols=64,dtype=f32','softmax/example','r1','tile=3,ratio=0.5,order=nk','{"tile":3,"ratio":0.5,"order":"nk"}','done',NULL,NULL,0);
INSERT INTO "trial" VALUES(5,1,'softmax:rows=64,cols=64,dtype=f32','softmax/example','r1','tile=4,ratio=0.5,order=nk','{"tile":4,"ratio":0.5,"order":"nk"}','done',NULL,NULL,0);
INSERT INTO "trial" VALUES(6,1,'softmax:rows=64,cols=64,dtype=f32','softmax/example','r1','tile=5,ratio=0.5,order=nk','{"tile":5,"ratio":0.5,"order":"nk"}','done',NULL,NULL,0);
INSERT INTO "trial" VALUES(7,1,'softmax:rows=64,cols=64,dtype=f32','softmax/example','r1','tile=6,ratio=0.5,order=nk','{"tile":6,"ratio":0.5,"order":"nk"}','done',NULL,NULL,0);
INSERT INTO "trial" VALUES(8,1,'softmax:rows=64,cols=64,dtype=f32','softmax/example','r1','tile=7,ratio=0.5,order=nk','{"tile":7,"ratio":0.5,"order":"nk"}','done',NULL,NULL,0);
INSERT INTO "trial" VALUES(9,1,'softmax:rows=64,cols=64,dtype=f32','softmax/example','r1','tile=8,ratio=0.5,order=nk','{"tile":8,"ratio":0.5,"order":"nk"}','done',NULL,NULL,0);
INSERT INTO "trial" VALUES(10,1,'softmax:rows=64,cols=64,dtype=f32','softmax/example','r1','tile=20,ratio=0.5,order=nk','{"tile":20,"ratio":0.5,"order":"nk"}','done',NULL,NULL,1);
INSERT INTO "trial" VALUES(11,1,'softmax:rows=64,cols=64,dtype=f32','softmax/example','r2','tile=20,ratio=0.5,order=nk','{"tile":20,"ratio":0.5,"order":"nk"}','done',NULL,NULL,0);
INSERT INTO "trial" VALUES(12,1,'softmax:rows=64,cols=64,dtype=f32','softmax/example','r1','tile=30,ratio=0.5,order=nk','{"tile":30,"ratio":0.5,"order":"nk"}','claimed','node9:1:42:abcd','2026-11-20 12:10:21.000000',0);
CREATE INDEX ix_device_architecture ON device (architecture);
CREATE INDEX ix_trial_stale ON trial (device_id, workload, variant) WHERE stale = 1;
CREATE INDEX ix_trial_workload ON trial (workload);
CREATE INDEX ix_trial_claim_owner ON trial (claim_owner) WHERE claim_owner IS NOT NULL;
CREATE INDEX ix_measurement_run_id ON measurement (run_id, id);
CREATE INDEX ix_measurement_trial_id ON measurement (trial_id);
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
            WHERE (m.kind = 'predicted' OR (m.kind = 'measured' AND m.verification <> 'not verified'
                                            AND m.median_us >= COALESCE(m.bound_us, 0)))
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
WHERE place = 1;
COMMIT;
