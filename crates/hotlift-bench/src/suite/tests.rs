use clap::Parser;
use hotlift_terminal::width;

use super::*;
use crate::figures;
use crate::record::tests::example;

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    matrix: MatrixArgs,
}

#[derive(Parser)]
struct Base {
    #[command(flatten)]
    guest: GuestArgs,
}

pub fn cells(suite: &Suite, flags: &[&str]) -> Vec<Cell> {
    let line = Line::parse_from(["t", "--guest=threads"].iter().chain(flags));
    let base = Base::parse_from(["t", "--ram=64M"]).guest;
    suite.cells(&base, &line.matrix).unwrap()
}

#[test]
fn every_optional_column_exists_in_the_result_tables() {
    let of_runs = figures::ALL.iter().map(|figure| figure.name);
    let of_rows = columns::ALL.iter().map(|column| column.name);
    let of_threads = counts::COUNTS.iter().map(|(name, _)| *name);
    let known = of_runs.chain(of_rows).chain(of_threads);
    // The last name occurs only in output of `demo`.
    let known: Vec<&str> = known.chain([threads::BY_QEMU, "ch"]).collect();
    for name in width::DISPENSABLE {
        assert!(known.contains(name), "{name}");
    }
}

#[test]
fn every_compiled_in_suite_is_valid() {
    for text in FILES {
        if let Err(error) = Suite::read(text) {
            let line = text.lines().find(|line| line.starts_with("name"));
            panic!("{line:?}: {}", hotlift_terminal::error::error_line(&error));
        }
    }
}

#[test]
fn every_row_finds_its_cell_again() {
    let published = SUITES.iter().filter(|suite| suite.sweeps.is_empty());
    for suite in published {
        let cells = cells(suite, &["--with=accel-path=dsa-model:"]);
        let rows: Vec<Row> = cells.iter().map(|cell| cell.row().unwrap()).collect();
        let mut found = 0;
        for (block, row) in suite.rows() {
            let cells = rows.iter().filter(|one| is_of(block, row, one)).count();
            // Only rows that require a hardware device may lack a cell.
            let mut options = block.options_of(row);
            let demands = options.any(|option| option == ("accelerator", "required"));
            assert!(
                cells == 1 || demands && cells == 0,
                "{}: {} {}: {cells}",
                suite.name,
                block.title,
                row.name
            );
            found += cells;
        }
        assert_eq!(found, rows.len(), "{}", suite.name);
    }
}

#[test]
fn runs_of_different_work_have_tables_of_their_own() {
    let cells = cells(find("dsa").unwrap(), &[]);
    let run = |series: &str, change: fn(&mut Record)| -> Vec<Record> {
        let of = |cell: &Cell| {
            let mut record = example();
            record.suite = "dsa".to_owned();
            record.series = series.to_owned();
            record.row = cell.row().unwrap();
            change(&mut record);
            record
        };
        cells.iter().map(of).collect()
    };
    let first = run("1", |_| ());
    for (tables, change) in [
        (1, (|_| ()) as fn(&mut Record)),
        (2, |run| run.row.guest.ram_bytes *= 2),
        (2, |run| run.row.guest.fill = "/data".to_owned()),
        (2, |run| run.row.guest.kind = "kvm".to_owned()),
        (2, |run| run.row.guest.vcpus = 2),
        (2, |run| run.row.link = Some("1gbit".to_owned())),
        (2, |run| run.machine.cpu = "another".to_owned()),
    ] {
        let all = [first.clone(), run("2", change)].concat();
        let split = split(&all);
        assert_eq!(split.len(), tables);
        assert_eq!(split.concat().len(), all.len());
    }
}

#[test]
fn with_refuses_an_option_that_rows_of_a_suite_set() {
    for (flag, refused) in [
        ("--with=multifd-channels=4", true),
        ("--with=zero-page-detection=none", true),
        ("--with=multifd-compression=zstd", true),
        ("--with=mem-prealloc=on", false),
        ("--with=accel-path=dsa-model:", false),
    ] {
        let line = Line::parse_from(["t", "--guest=threads", flag]);
        let base = Base::parse_from(["t", "--ram=64M"]).guest;
        let cells = find("dsa").unwrap().cells(&base, &line.matrix);
        assert_eq!(cells.is_err(), refused, "{flag}");
    }
}

#[test]
fn a_suite_without_runs_shows_what_was_published() {
    for suite in SUITES.iter() {
        let text = suite.sheet(&[]).to_string();
        for (block, row) in suite.rows() {
            assert!(
                text.contains(&row.name) && text.contains(&block.title),
                "{text}"
            );
        }
    }
    assert!(find("das").unwrap_err().contains("dsa, multithread"));
}
